"""Continues a completion after tokens that another engine generated, in an engine that treats them as part of the
prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rollout_worker.backends.port import Choice, Delta, Request, cannot_continue
from rollout_worker.backends.tokens import TextCodec, TextStream, stopped_text


class GoingOn:
    """Does what such an engine cannot: the text, stop strings, and limits that count from the first token. Raises
    AttemptError if the request depends on the first tokens in other ways.

    `sampling` is for the engine. `repeated` is the first delta. `whole` is the choice once it has ended.
    """

    def __init__(self, codec: TextCodec, prompt: list[int], request: Request) -> None:
        sampling = request.sampling
        if sampling.structure is not None:
            raise cannot_continue("its text has a form that the engine follows from its first token")
        if sampling.presence_penalty or sampling.frequency_penalty or sampling.bad_words:
            raise cannot_continue("its penalties or bad words concern the tokens that were drawn")
        self._codec = codec
        self._prompt = prompt
        self._asked = sampling
        self._ids = list(request.so_far)
        self._logprobs: list[dict[str, Any]] = []
        self._stream = TextStream(codec, prompt, sampling)
        done = len(request.so_far)
        if sampling.max_tokens <= done:
            raise cannot_continue("it has all its tokens")
        self.sampling = replace(
            sampling,
            stop=(),
            max_tokens=sampling.max_tokens - done,
            min_tokens=max(0, sampling.min_tokens - done),
            seed=sampling.seed + done,  # with the same, what is drawn would follow the first tokens
        )
        self.repeated = Delta(0, self._stream.add(self._ids), request.so_far, repeated=True)
        self.whole: Choice | None = None

    def shown(self, delta: Delta, finish: str) -> Delta:
        """Convert an engine's delta of new ids for its consumer. `finish` is why the engine ended, "" if it did not."""
        text = ""
        for count, token in enumerate(delta.ids, 1):
            self._ids.append(token)
            cut = stopped_text(self._codec, self._prompt, self._ids, self._asked)
            if cut is not None or (finish and count == len(delta.ids)):
                return self._ended(delta, count, text, cut, finish)
            text += self._stream.add([token])
        if finish:
            return self._ended(delta, 0, text, None, finish)
        self._logprobs += delta.logprobs
        return replace(delta, text=text, last=False)

    def _ended(self, delta: Delta, count: int, text: str, cut: str | None, finish: str) -> Delta:
        """End with the first `count` of the delta's ids."""
        asked = self._asked
        if cut is None and count and (finish != "stop" or asked.include_stop):  # else that token ended the text
            text += self._stream.add(self._ids[-1:])
        # As vLLM does it: the bytes of a character that is not whole are no text.
        whole = self._stream.text if cut is None else cut
        logprobs = delta.logprobs[:count]
        self._logprobs += logprobs
        known = None if asked.logprobs is None else self._logprobs
        self.whole = Choice(whole, finish if cut is None else "stop", len(self._ids), known)
        return replace(delta, text=text + self._stream.rest(whole), ids=delta.ids[:count], logprobs=logprobs, last=True)

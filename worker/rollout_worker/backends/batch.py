"""A continuous batch over a Hugging Face model: rows join and leave between two steps.

One thread owns the model. Rows are left-padded to a common length in one key-value cache; each has its own positions,
mask, sampling and random numbers, so a row's result does not depend on its neighbours (up to floating-point rounding).
Rows of similar length join together, to save padding.

A group that runs alone is a batch of its own, with one shape from its first pass to its last: rows that have ended stay
until all have. Its results are the same to the last bit, even if another row of the group ends sooner.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import structlog
from rollout.model.errors import AttemptError

from rollout_worker.backends.lifeline import die
from rollout_worker.backends.port import Choice, Delta, Sampling
from rollout_worker.backends.sampling import RowState, drawn_logprobs, next_tokens, token_logprobs
from rollout_worker.backends.tokens import TextCodec, TextStream, stopped_text

_log = structlog.get_logger()

_PREFILL_TOKENS = 8192
"""Maximum padded tokens of prompts in one pass, which bounds memory."""
_PADDING = 2
"""Prompts share a pass if the longest is at most this many times as long as the shortest ..."""
_SHORT = 64
"""... or has at most this many tokens: a separate pass would cost more than the padding."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A completion in progress. `done` is called once, from the model's thread."""

    prompt: list[int]
    sampling: Sampling
    seed: int
    done: Callable[[Choice | BaseException], None]
    limit: int
    eos: frozenset[int]
    constraint: Any = None
    alone: object = None  # the group that it is a row of
    adapter: str = ""  # by peft's name; empty: the model has no adapters, or one for all
    inputs: dict[str, Any] = field(default_factory=dict[str, Any])
    """Inputs of the model besides the prompt, such as pixels: tensors of one row, which is then prefilled alone."""
    so_far: tuple[int, ...] = ()
    drawn: Callable[[Delta], None] | None = None
    """Called for each token, from the model's thread, before `done`."""
    cancelled: bool = False
    ended: bool = False
    state: RowState = field(init=False)
    stream: TextStream | None = None

    def __post_init__(self) -> None:
        draws = random.Random(self.seed)
        for token in self.so_far:
            if self.sampling.temperature > 0:  # as many as were made for these tokens
                draws.random()
            if self.constraint is not None:
                self.constraint.accept(token)
        self.state = RowState(self.sampling, self.prompt, list(self.so_far), draws, self.eos, self.constraint)

    @property
    def length(self) -> int:
        """Number of tokens before the first new one."""
        return len(self.prompt) + len(self.so_far)


class ContinuousBatch(threading.Thread):
    def __init__(self, model: Any, codec: TextCodec, device: str, max_sequences: int) -> None:
        super().__init__(name="transformers-batch", daemon=True)
        self._model = model
        self._codec = codec
        self._device = device
        self._max_sequences = max_sequences
        self._waiting: deque[Sequence] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._live: list[Sequence] = []
        self._cache: Any = None
        self._mask: Any = None
        self.between_rounds = threading.Lock()
        """Held while the model is in use."""

    def submit(self, sequences: Iterable[Sequence]) -> None:
        """Submit sequences, which start in the same round if there is room; a group that runs alone needs none."""
        with self._wake:
            if self._stopping:
                raise AttemptError("the engine is shutting down", code="engine_stopped")
            self._waiting.extend(sequences)
            self._wake.notify()

    def stop(self) -> None:
        """Fail open sequences and end the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def run(self) -> None:
        import torch

        with torch.inference_mode():
            while True:
                with self._wake:
                    if not (self._waiting or self._live):
                        torch.cuda.empty_cache()  # a process that has the device by turns may want the memory
                    while not (self._stopping or self._waiting or self._live):
                        self._wake.wait()
                    if self._stopping:
                        break
                with self.between_rounds:
                    self._round()
        error = AttemptError("the engine was stopped", code="engine_stopped")
        for sequence in [*self._live, *self._waiting]:
            sequence.done(error)

    def _round(self) -> None:
        """Admit sequences, then generate one token for each."""
        admitted: list[Sequence] = []
        try:
            self._keep([not sequence.cancelled for sequence in self._live])
            admitted = self._admit()
            if admitted:
                for part in [admitted] if admitted[0].alone is not None else passes(admitted):
                    self._prefill(part)
            elif self._live:
                self._decode()
        except Exception as error:  # noqa: BLE001 - a fault in the model must reach its rows, or they wait for ever
            self._fail_all(error, admitted)

    def _admit(self) -> list[Sequence]:
        """Admit the sequence that has waited longest, which prevents starvation, and those nearest to it in length."""
        with self._wake:
            self._waiting = deque(sequence for sequence in self._waiting if not sequence.cancelled)
            room = self._max_sequences - len(self._live)
            if not self._waiting or room <= 0:
                return []
            first = self._waiting[0]
            if first.alone is not None or (self._live and self._live[0].alone is not None):
                return self._admit_alone(first.alone)
            together = list(takewhile(lambda sequence: sequence.alone is None, self._waiting))
            together.sort(key=lambda sequence: abs(sequence.length - first.length))
            admitted = together[:room]
            taken = set(map(id, admitted))
            self._waiting = deque(sequence for sequence in self._waiting if id(sequence) not in taken)
        return admitted

    def _admit_alone(self, group: object) -> list[Sequence]:
        """Admit all of `group`, which is next, however many they are, once nothing else runs."""
        admitted: list[Sequence] = []
        while not self._live and self._waiting and self._waiting[0].alone is group:
            sequence = self._waiting.popleft()
            if not sequence.cancelled:
                admitted.append(sequence)
        return admitted

    def _prefill(self, admitted: list[Sequence]) -> None:
        import torch

        prompts = [[*sequence.prompt, *sequence.so_far] for sequence in admitted]
        rows = list(range(len(admitted)))
        if admitted[0].alone is not None and all(prompt == prompts[0] for prompt in prompts):  # read once
            prompts, rows = prompts[:1], [0] * len(admitted)
        width = max(len(prompt) for prompt in prompts)
        pads = [width - len(prompt) for prompt in prompts]
        ids = torch.tensor([[0] * pad + prompt for pad, prompt in zip(pads, prompts, strict=True)], device=self._device)
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads], device=self._device)
        positions = (mask.cumsum(dim=-1) - 1).clamp(min=0)
        logits, cache = self._forward(ids, mask, positions, None, admitted[: len(prompts)])
        keep = self._choose(admitted, logits if len(prompts) == len(rows) else logits[rows])
        if admitted[0].alone is not None:
            keep = [any(keep)] * len(keep)
        kept = [sequence for sequence, live in zip(admitted, keep, strict=True) if live]
        if not kept:
            return
        layers, mask = select(layers_of(cache), mask, [row for row, live in zip(rows, keep, strict=True) if live])
        if self._live:
            layers, mask = merge(layers_of(self._cache), self._mask, layers, mask)
        self._cache, self._mask = cache_of(layers), mask
        self._live += kept

    def _decode(self) -> None:
        import torch

        live = self._live
        ids = torch.tensor([[sequence.state.generated[-1]] for sequence in live], device=self._device)
        places = [[len(sequence.prompt) + len(sequence.state.generated) - 1] for sequence in live]
        self._mask = torch.cat([self._mask, self._mask.new_ones((len(live), 1))], dim=1)
        positions = torch.tensor(places, device=self._device)
        logits, self._cache = self._forward(ids, self._mask, positions, self._cache, live)
        self._keep(self._choose(live, logits))

    def _forward(self, ids: Any, mask: Any, positions: Any, cache: Any, of: list[Sequence]) -> tuple[Any, Any]:
        adapters = {"adapter_names": [sequence.adapter for sequence in of]} if of[0].adapter else {}
        inputs = of[0].inputs if cache is None else {}
        out = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache_of([]) if cache is None else cache,
            use_cache=True,
            logits_to_keep=1,
            **adapters,
            **inputs,
        )
        return out.logits[:, -1, :].float(), out.past_key_values

    def _choose(self, sequences: list[Sequence], logits_BV: Any) -> list[bool]:
        """Give each sequence its next token, and return whether it continues."""
        wants = [s.sampling.logprobs is not None or s.sampling.ids for s in sequences]
        raw = logits_BV.clone() if any(wants) else None
        tokens = next_tokens(logits_BV, [sequence.state for sequence in sequences])
        drawn: list[float] | None = None
        if raw is not None and any(sequence.sampling.ids for sequence in sequences):
            drawn = drawn_logprobs(raw, tokens, [sequence.sampling.temperature for sequence in sequences])
        going: list[bool] = []
        for index, (sequence, token) in enumerate(zip(sequences, tokens, strict=True)):
            if sequence.ended:
                going.append(False)
                continue
            state = sequence.state
            state.generated.append(token)
            if raw is not None and sequence.sampling.logprobs is not None:
                top = sequence.sampling.logprobs
                state.logprobs.append(token_logprobs(raw[index], token, top, self._codec.name))
            if drawn is not None:
                state.id_logprobs.append(drawn[index])
            try:
                outcome = self._ended(sequence, token)
            except AttemptError as error:
                outcome = error
            if sequence.drawn is not None and not isinstance(outcome, AttemptError):
                sequence.drawn(self._delta(sequence, token, outcome))
            if outcome is not None:
                sequence.ended = True
                sequence.done(outcome)
            going.append(outcome is None)
        return going

    def _delta(self, sequence: Sequence, token: int, whole: Choice | None) -> Delta:
        stream = self._stream(sequence)
        text = stream.add([token]) if whole is None else stream.rest(whole.text)
        logprobs = () if sequence.sampling.logprobs is None else (sequence.state.logprobs[-1],)
        return Delta(0, text, (token,), logprobs, last=whole is not None)

    def _stream(self, sequence: Sequence) -> TextStream:
        if sequence.stream is None:
            sequence.stream = TextStream(self._codec, sequence.prompt, sequence.sampling)
        return sequence.stream

    def _ended(self, sequence: Sequence, token: int) -> Choice | None:
        sampling, generated = sequence.sampling, sequence.state.generated
        at_stop = token in sampling.stop_ids
        at_eos = at_stop or (token in sequence.eos and not sampling.ignore_eos)
        complete = sequence.constraint is not None and not at_eos and sequence.constraint.accept(token)
        hidden = at_stop and not (sampling.ids or sampling.include_stop)
        if hidden or (at_eos and not sampling.skip_special):  # no engine shows the token that ended the text
            return self._choice(sequence, self._text(sequence, generated[:-1]), "stop")
        if at_eos or complete:
            return self._choice(sequence, None, "stop")
        text = stopped_text(self._codec, sequence.prompt, generated, sampling)
        if text is not None:
            return self._choice(sequence, text, "stop")
        if len(generated) >= sequence.limit:
            return self._choice(sequence, None, "length")
        return None

    def _choice(self, sequence: Sequence, text: str | None, reason: str) -> Choice:
        generated = sequence.state.generated
        if text is None:
            text = self._text(sequence, generated)
        logprobs = None if sequence.sampling.logprobs is None else sequence.state.logprobs
        choice = Choice(text, reason, len(generated), logprobs)
        if sequence.sampling.ids:
            choice.ids, choice.id_logprobs = generated, sequence.state.id_logprobs
        return choice

    def _text(self, sequence: Sequence, ids: list[int]) -> str:
        return self._codec.decode(sequence.prompt, ids, skip_special=sequence.sampling.skip_special)

    def _keep(self, going: list[bool]) -> None:
        if all(going) or (any(going) and self._live[0].alone is not None):
            return
        self._live = [sequence for sequence, live in zip(self._live, going, strict=True) if live]
        if not self._live:
            self._cache = self._mask = None
            return
        layers, self._mask = select(layers_of(self._cache), self._mask, [n for n, live in enumerate(going) if live])
        self._cache = cache_of(layers)

    def _fail_all(self, error: Exception, admitted: list[Sequence]) -> None:
        import torch

        memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
        code = "out_of_memory" if memory else "engine_error"
        hint = ": lower backend.max_num_seqs or backend.max_model_len" if memory else ""
        _log.error("engine_step_failed", code=code, error=repr(error), rows=len(self._live) + len(admitted))
        if "CUDA error" in str(error) and not memory:
            die()  # after a fault on the device every later call fails too: only a new process helps
        failure = AttemptError(f"the model failed in a step: {error!r}{hint}", code=code)
        failed = {id(sequence): sequence for sequence in [*self._live, *admitted]}
        self._live, self._cache, self._mask = [], None, None
        for sequence in failed.values():
            if not sequence.ended:
                sequence.done(failure)


def passes(admitted: list[Sequence]) -> list[list[Sequence]]:
    """Group sequences whose prompts share a pass, the longest first."""
    parts: list[list[Sequence]] = []
    width = 0
    for sequence in sorted(admitted, key=lambda sequence: -sequence.length):
        fits = parts and width * (len(parts[-1]) + 1) <= _PREFILL_TOKENS
        apart = sequence.inputs or (parts and parts[-1][0].inputs)
        if fits and not apart and width <= max(_SHORT, _PADDING * sequence.length):
            parts[-1].append(sequence)
        else:
            parts.append([sequence])
            width = sequence.length
    return parts


Layers = list[tuple[Any, Any]]
"""Keys and values of each layer: [rows, heads, length, width]."""


def layers_of(cache: Any) -> Layers:
    layers = getattr(cache, "layers", None)
    if layers is not None:
        return [(layer.keys, layer.values) for layer in layers]
    return list(zip(cache.key_cache, cache.value_cache, strict=True))


def cache_of(layers: Layers) -> Any:
    from transformers import DynamicCache

    cache: Any = DynamicCache()
    for index, (keys, values) in enumerate(layers):
        cache.update(keys, values, index)
    return cache


def select(layers: Layers, mask: Any, chosen: list[int]) -> tuple[Layers, Any]:
    """Keep the chosen rows, without the padding that all of them share."""
    import torch

    rows = torch.tensor(chosen, device=mask.device)
    mask = mask[rows]
    first = int(mask.argmax(dim=-1).min())
    return [(keys[rows, :, first:], values[rows, :, first:]) for keys, values in layers], mask[:, first:]


def merge(layers: Layers, mask: Any, new_layers: Layers, new_mask: Any) -> tuple[Layers, Any]:
    """Merge two batches, left-padded to the longer of the two."""
    import torch

    width = max(mask.shape[1], new_mask.shape[1])

    def padded(tensor: Any, axis: int) -> Any:
        missing = width - tensor.shape[axis]
        if not missing:
            return tensor
        shape = list(tensor.shape)
        shape[axis] = missing
        return torch.cat([tensor.new_zeros(shape), tensor], dim=axis)

    merged = [
        tuple(torch.cat([padded(old, 2), padded(new, 2)]) for old, new in zip(before, after, strict=True))
        for before, after in zip(layers, new_layers, strict=True)
    ]
    return [(keys, values) for keys, values in merged], torch.cat([padded(mask, 1), padded(new_mask, 1)])

"""The rows of a batch as the model sees them: the first prompts, and the token counts of all."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rollout.model.counts import counted
from rollout.workloads.infer.config import InferConfig
from rollout.workloads.infer.model import ResolvedModel
from rollout.workloads.infer.rows import effective_sampling, request_of, row_of
from rollout.workloads.infer.token_counter import brings_tokenizer, counter, prompts_in, require_tokenizer
from rollout.workloads.infer.workload import Infer
from rollout.workloads.input_lines import Line
from rollout.workloads.json_form import JsonObject
from rollout.workloads.port import checked_here

_NAMED = 10
"""Number of rows of each kind to name."""
_TELL_EVERY = 10_000


@dataclass(slots=True)
class Preview:
    """`prompts` are the first ones, as {row, file, line, tokens, text}. `tokens` has the count of each prompt. `limit`
    is the model's context in tokens, or None if unknown. `too_long` are prompts that leave no room for a completion,
    `cut` others whose `max_tokens` do not fit, `refused` rows without a prompt, with `code` and `message`. The first
    rows of these three are named, all are counted."""

    rows: int = 0
    limit: int | None = None
    prompts: list[JsonObject] = field(default_factory=list[JsonObject])
    tokens: array[int] = field(default_factory=lambda: array("q"))
    too_long: list[JsonObject] = field(default_factory=list[JsonObject])
    cut: list[JsonObject] = field(default_factory=list[JsonObject])
    refused: list[JsonObject] = field(default_factory=list[JsonObject])
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("too_long", "cut", "refused"), 0))

    def add(self, answer: JsonObject) -> None:
        at: JsonObject = answer["at"]
        place = {key: at[key] for key in ("row", "file", "line")}
        if "error" in answer:
            self._name("refused", self.refused, place | {"code": answer["code"], "message": answer["error"]})
            return
        tokens: int = answer["tokens"]
        self.tokens.append(tokens)
        if "text" in answer:
            self.prompts.append(place | {"tokens": tokens, "text": answer["text"]})
        needed = 1 if at["max_tokens"] else 0  # a row that asks for an embedding needs no room beside its prompt
        if self.limit is not None and tokens + needed > self.limit:
            self._name("too_long", self.too_long, place | {"tokens": tokens})
        elif self.limit is not None and tokens + at["max_tokens"] > self.limit:
            self._name("cut", self.cut, place | {"tokens": tokens, "max_tokens": at["max_tokens"]})

    def _name(self, kind: str, known: list[JsonObject], one: JsonObject) -> None:
        self.counts[kind] += 1
        if len(known) < _NAMED:
            known.append(one)

    def statistics(self) -> JsonObject | None:
        """Return nearest-rank statistics of the token counts, or None if there is no prompt."""
        if not self.tokens:
            return None
        ordered = sorted(self.tokens)
        ranks = {name: -(-len(ordered) * percent // 100) - 1 for name, percent in (("median", 50), ("p99", 99))}
        named = {name: ordered[max(0, rank)] for name, rank in ranks.items()}
        return {"min": ordered[0], **named, "max": ordered[-1], "total": sum(ordered)}

    def to_json(self) -> JsonObject:
        return {
            "rows": self.rows,
            "prompts": self.prompts,
            "tokens": self.statistics(),
            "limit": self.limit,
            **{kind: {"rows": self.counts[kind], "first": getattr(self, kind)} for kind in self.counts},
        }

    def lines(self) -> Iterator[str]:
        for one in self.prompts:
            yield f"row {one['row']} ({one['file']}:{one['line']}), {counted(one['tokens'], 'token')}:"
            yield one["text"]
            yield ""
        found = self.statistics()
        if found is not None:
            yield (
                f"{counted(self.rows, 'row')}: {found['min']:,} to {found['max']:,} tokens a prompt, median "
                f"{found['median']:,}, p99 {found['p99']:,}; {found['total']:,} in all"
            )
        holds = f"the {self.limit:,} tokens that the model holds"
        yield from self._named("too_long", "too long for " + holds, lambda one: f"{one['tokens']:,}")
        more = f"more than {holds} with max_tokens, so completions may be cut"
        yield from self._named("cut", more, lambda one: f"{one['tokens']:,} + {one['max_tokens']:,}")
        yield from self._named("refused", "without a prompt", lambda one: f"{one['code']}: {one['message']}")

    def _named(self, kind: str, what: str, about: Callable[[JsonObject], str]) -> Iterator[str]:
        named: list[JsonObject] = getattr(self, kind)
        if named:
            yield f"{counted(self.counts[kind], 'row')} {what}:"
            yield from (f"  {one['file']}:{one['line']}: {about(one)}" for one in named)
        if (more := self.counts[kind] - len(named)) > 0:
            yield f"  and {more:,} more"


def preview(settings: InferConfig, show: int, tell: Callable[[str], None]) -> Preview:
    """Preview all rows and render the first `show`. Raises ConfigError or InputError, also for what `rollout plan`
    finds. Blocking."""
    require_tokenizer(settings.backend.kind, settings.model.uri, settings.model.tokenizer)
    found = Preview()
    with checked_here(Infer(), settings, tell=tell) as checked:
        found.rows = checked.total - checked.invalid
        rows = prompts(settings, checked.lines(0), show)
        with counter(wanted(settings, checked.model), rows) as answers:
            found.limit = next(answers)["limit"]
            for number, answer in enumerate(answers):
                found.add(answer)
                if number % _TELL_EVERY == 0:
                    tell(f"counting tokens: {number:,} of {counted(found.rows, 'row')}")
    return found


def wanted(settings: InferConfig, model: ResolvedModel) -> JsonObject:
    """Return what the counter has to load."""
    own: Path | str = model.path or settings.model.uri
    has_files = brings_tokenizer(settings.backend.kind, settings.model.uri)
    return {
        "tokenizer": str(model.tokenizer_path or settings.model.tokenizer or own),
        "revision": settings.model.revision,
        "model": str(own) if has_files else None,
        "trust_remote_code": settings.backend.trust_remote_code,
        "max_model_len": settings.backend.max_model_len,
    }


def prompts(settings: InferConfig, lines: Iterable[Line], show: int) -> Iterator[JsonObject]:
    """Yield the prompts of each usable row."""
    sampling = effective_sampling(settings)
    for line in lines:
        if line.fault:
            continue
        request = request_of(row_of(line), sampling, settings.backend.kind)
        max_tokens = 0 if request.embeds else request.sampling.max_tokens
        at = {"row": line.index + 1, "file": line.file, "line": line.line, "max_tokens": max_tokens}
        for prompt in prompts_in(request):
            yield prompt | {"show": show > 0, "at": at}
            show -= 1

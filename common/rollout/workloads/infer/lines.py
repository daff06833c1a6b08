"""Lines of the output files, and what a batch adds to the summary."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast

from blake3 import blake3

from rollout.model.item import Outcome
from rollout.workloads.commit import CommitEntry
from rollout.workloads.infer.config import SamplingSection
from rollout.workloads.infer.openai import openai_error, openai_line, shown_vectors
from rollout.workloads.infer.payload import ChoiceResult, Payload, RowResult, decode_payload, decode_result
from rollout.workloads.infer.request import RowRequest, id_key, parse_row, sampling_json
from rollout.workloads.invalid import invalid_of
from rollout.workloads.json_form import JsonObject, dump_line, invalid_result, timestamp
from rollout.workloads.port import Totals, unsuccessful

COMPLETIONS, ERRORS, OPENAI, EMBEDDINGS = "completions.jsonl", "errors.jsonl", "openai.jsonl", "embeddings.jsonl"
# Keys of a row that are shown under another name, or in full elsewhere.
_NOT_EXTRA = frozenset({"prompt", "messages", "body", "sampling"})


class InferWriter:
    """Writes result lines. `config` is the run's, with the current [output]."""

    def __init__(self, config: JsonObject) -> None:
        self._config = config
        self._model: JsonObject = config["model"]
        self._kind: str = config["backend"]["kind"]
        self._sampling = SamplingSection.model_validate(config["sampling"])
        self._openai = bool(config["output"].get("openai"))
        self.files: tuple[str, ...] = (COMPLETIONS, ERRORS, OPENAI) if self._openai else (COMPLETIONS, ERRORS)

    def lines(self, entry: CommitEntry) -> Iterator[tuple[str, bytes]]:
        bad = invalid_of(entry.payload)
        payload = decode_payload(entry.payload) if bad is None else Payload(bad.input, entry.seq, bad.file, bad.line)
        identity = row_id(payload.row, entry.id)
        if entry.outcome is Outcome.DONE:
            request, result = parse_row(payload.row, self._sampling, self._kind), decode_result(entry.data)
            check_fits(request, result)
            make = embedding_line if request.embeds else completion_line
            name = EMBEDDINGS if request.embeds and EMBEDDINGS in self.files else COMPLETIONS
            yield name, dump_line(make(payload.row, identity, request, result, entry, self._model))
            if self._openai:
                yield OPENAI, dump_line(openai_line(identity, request, result, entry, self._model))
            return
        why = unsuccessful(entry)
        yield ERRORS, dump_line(error_line(payload, identity, why.code, why.message, entry))
        if self._openai:
            # Who reads by custom_id must not find this in the place of the row that has it.
            own = entry.id.hex() if bad is not None and bad.repeats else identity
            yield OPENAI, dump_line(openai_error(own, why.code, why.message, entry))

    def summary(self, summary: JsonObject, totals: Totals) -> JsonObject:
        first = ("run_id", "state")
        cost = cost_of(self._config, totals)
        return {
            **{key: summary[key] for key in first},
            "model_uri": self._model["uri"],
            "model_content_id": self._model["content_id"],
            "backend": self._kind,
            "rows": summary["rows"],
            "tokens": {"prompt": totals.units_in, "completion": totals.units_out},
            **({} if cost is None else {"cost": cost}),
            **{key: value for key, value in summary.items() if key not in first},
        }


class EmbeddingsWriter(InferWriter):
    """Writes the results of a run some of whose rows ask for embeddings."""

    def __init__(self, config: JsonObject) -> None:
        super().__init__(config)
        self.files = (COMPLETIONS, EMBEDDINGS, *self.files[1:])
        self.memory: JsonObject = {}

    def lines(self, entry: CommitEntry) -> Iterator[tuple[str, bytes]]:
        for name, line in super().lines(entry):
            if name == EMBEDDINGS:
                self.memory["rows"] = self.memory.get("rows", 0) + 1
            yield name, line

    def summary(self, summary: JsonObject, totals: Totals) -> JsonObject:
        return {**super().summary(summary, totals), "embeddings": {"rows": self.memory.get("rows", 0)}}


def check_fits(request: RowRequest, result: RowResult) -> None:
    """Raise InvalidResultError if the result is text for an embedding request, or the reverse, or if vectors are
    missing."""
    if request.embeds != (result.embeddings is not None):
        raise invalid_result("it is no answer to what the row asks")
    if request.embed is not None and len(result.embeddings or ()) != len(request.embed.inputs):
        raise invalid_result("it has not one embedding of each input")


def cost_of(config: JsonObject, totals: Totals) -> JsonObject | None:
    """Return the cost by the run's prices, or None if it has none. If the cost is unknown, `total` is null and
    `unknown` says why."""
    price = config["backend"].get("prices", {}).get(config["model"]["uri"])
    if price is None:
        return None
    if totals.done and not totals.units_in:
        return {"total": None, "unknown": "the server did not report how many tokens rows took"}
    prompt = round(totals.units_in * price["input"] / 1_000_000, 9)
    completion = round(totals.units_out * price["output"] / 1_000_000, 9)
    return {"prompt": prompt, "completion": completion, "total": round(prompt + completion, 9)}


def row_id(row: Any, item: bytes) -> Any:
    """Return the row's own `id` or `custom_id`, or its item id in hex."""
    if isinstance(row, str):  # a line that cannot be used: a key that stands twice, say, does not hide who asked
        with suppress(ValueError, RecursionError):
            row = json.loads(row)
    if not isinstance(row, dict):
        return item.hex()
    fields = cast(JsonObject, row)
    own = fields.get(id_key(fields))
    return own if isinstance(own, str | int) and not isinstance(own, bool) else item.hex()


def completion_line(
    row: JsonObject, identity: Any, request: RowRequest, result: RowResult, entry: CommitEntry, model: JsonObject
) -> JsonObject:
    """Return a line of completions.jsonl. Extra input fields are kept; if their name is taken, they move into
    `input`."""
    first = result.choices[0]
    line: JsonObject = {
        "id": identity,
        **request.content,
        "completion": first.text,
        "sampling_params": sampling_json(request.sampling),
        "model_uri": model["uri"],
        "finish_reason": first.finish_reason,
        "model_content_id": model["content_id"],
        "completion_blob_id": blake3(first.text.encode("utf-8", "surrogatepass")).hexdigest(),
        "generated_at": timestamp(entry.accepted_ms),
        "usage": {"prompt_tokens": result.prompt_tokens, "completion_tokens": sum(c.tokens for c in result.choices)},
    }
    line |= _parted(first)
    if len(result.choices) > 1:
        line["completions"] = [
            {
                "text": choice.text,
                "finish_reason": choice.finish_reason,
                "tokens": choice.tokens,
                **_parted(choice),
            }
            for choice in result.choices
        ]
    return _with_extra(line, row, _NOT_EXTRA)


def _parted(choice: ChoiceResult) -> JsonObject:
    """Return the parts of a choice besides its text."""
    found: JsonObject = {
        "logprobs": choice.logprobs,
        "tool_calls": choice.tool_calls,
        "reasoning": choice.reasoning,
        "refusal": choice.refusal,
        "note": choice.note,
    }
    return {key: value for key, value in found.items() if value is not None}


def embedding_line(
    row: JsonObject, identity: Any, request: RowRequest, result: RowResult, entry: CommitEntry, model: JsonObject
) -> JsonObject:
    """Return a line of embeddings.jsonl."""
    vectors = shown_vectors(request, result)
    line: JsonObject = {
        "id": identity,
        **request.content,
        **({"embedding": vectors[0]} if len(vectors) == 1 else {"embeddings": vectors}),
        "dimensions": len((result.embeddings or ((),))[0]),
        "model_uri": model["uri"],
        "model_content_id": model["content_id"],
        "generated_at": timestamp(entry.accepted_ms),
        "usage": {"prompt_tokens": result.prompt_tokens},
    }
    return _with_extra(line, row, _NOT_EXTRA | {"embed"})


def _with_extra(line: JsonObject, row: JsonObject, shown: frozenset[str]) -> JsonObject:
    if id_key(row) == "id":
        shown = shown | {"id"}
    extra = {key: value for key, value in row.items() if key not in shown}
    taken = {key: extra.pop(key) for key in list(extra) if key in line}
    line.update(extra)
    if taken:
        place = "row" if "input" in line and "input" not in extra else "input"
        line[place] = taken if place not in extra else {**taken, place: extra[place]}
    return line


def error_line(payload: Payload, identity: Any, code: str, message: str, entry: CommitEntry) -> JsonObject:
    """Return a line of errors.jsonl. Rows count from 1, as lines do."""
    return {
        "id": identity,
        "row": payload.index + 1,
        "file": payload.file,
        "line": payload.line,
        "code": code,
        "message": message,
        "attempts": entry.tries,
        "failed_at": timestamp(entry.accepted_ms),
        "input": payload.row,
    }

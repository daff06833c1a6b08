"""Tokens, cost and errors in the output of coding CLIs. There is one function for each, from a file of lines to a
count.

A program that was killed has printed only a part: without the total at the end, its messages are counted. Lines in
another format are skipped: they are output of a command, or a warning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from rollout_worker.json_fields import count, dollars, listed, table
from rollout_worker.trials.port import UsageCount


@dataclass(slots=True)
class Read:
    """`lines` are the program's output, or its file. `usage` and `error` are filled in; `error` is what it reported."""

    lines: Iterable[str]
    usage: UsageCount = field(default_factory=UsageCount)
    error: str = ""
    refused: bool = False

    def events(self) -> Iterator[dict[str, Any]]:
        for line in self.lines:
            if line.lstrip().startswith("{"):
                try:
                    value: Any = json.loads(line)
                except ValueError:
                    continue
                if isinstance(value, dict):
                    yield cast("dict[str, Any]", value)


def _anthropic(usage: dict[str, Any]) -> UsageCount:
    """Convert Anthropic's usage, which counts tokens read from and written to the cache separately from
    `input_tokens`."""
    read = count(usage.get("cache_read_input_tokens"))
    written = count(usage.get("cache_creation_input_tokens"))
    return UsageCount(count(usage.get("input_tokens")) + read + written, read, count(usage.get("output_tokens")))


def claude_code(read: Read) -> None:
    """Read `--output-format stream-json`: `assistant` events have the usage of a message so far (the last of an id
    counts), the `result` has the total by model."""
    messages: dict[str, UsageCount] = {}
    for event in read.events():
        if event.get("type") == "assistant":
            message = table(event.get("message"))
            messages[str(message.get("id"))] = _anthropic(table(message.get("usage")))
            read.refused = message.get("stop_reason") == "refusal"
        elif event.get("type") == "result":
            by_model = table(event.get("modelUsage"))
            messages = {}
            for name, value in by_model.items():
                fields = table(value)
                cached = count(fields.get("cacheReadInputTokens"))
                written = count(fields.get("cacheCreationInputTokens"))
                one = UsageCount(
                    count(fields.get("inputTokens")) + cached + written, cached, count(fields.get("outputTokens")),
                    dollars(fields.get("costUSD")),
                )  # fmt: skip
                read.usage.models[name] = messages[name] = one
            if not by_model:
                messages[""] = _anthropic(table(event.get("usage")))
            for one in messages.values():
                read.usage.add(one)
            messages = {}
            if (cost := dollars(event.get("total_cost_usd"))) is not None:
                read.usage.cost_usd = cost
            if event.get("is_error"):
                read.error = str(event.get("result") or event.get("errors") or event.get("subtype") or "error")
    for one in messages.values():
        read.usage.add(one)


def codex(read: Read) -> None:
    """Read `exec --json`: each `turn.completed` has the usage of its turn, with cached tokens included in the input.

    `error` events also report failures that are retried.
    """
    for event in read.events():
        if event.get("type") == "turn.completed":
            read.error = ""  # what went wrong on the way did not stay so
            usage = table(event.get("usage"))
            read.usage.add(
                UsageCount(
                    count(usage.get("input_tokens")), count(usage.get("cached_input_tokens")),
                    count(usage.get("output_tokens")),
                ),
            )  # fmt: skip
        elif event.get("type") == "turn.failed":
            read.error = str(table(event.get("error")).get("message") or "the turn failed")
        elif event.get("type") == "error":
            read.error = str(event.get("message") or "error")


def gemini_cli(read: Read) -> None:
    """Read `--output-format stream-json`: the `result` has `stats`, by model in versions that support it."""
    for event in read.events():
        if event.get("type") == "error":
            read.error = str(event.get("message") or table(event.get("error")).get("message") or "error")
        if event.get("type") != "result":
            continue
        if error := table(event.get("error")):
            read.error = str(error.get("message") or error.get("type") or "error")
        stats = table(event.get("stats"))
        one = UsageCount(count(stats.get("input_tokens")), count(stats.get("cached")), 0)
        # The total holds the thoughts too, which are billed as output and stand nowhere else.
        one.output_tokens = max(count(stats.get("output_tokens")), count(stats.get("total_tokens")) - one.input_tokens)
        read.usage.add(one)
        for name, value in table(stats.get("models")).items():
            fields = table(value)
            inputs = count(fields.get("input_tokens"))
            outputs = max(count(fields.get("output_tokens")), count(fields.get("total_tokens")) - inputs)
            read.usage.models[name] = UsageCount(inputs, count(fields.get("cached")), outputs)


def qwen_code(read: Read) -> None:
    """Read `--output-format stream-json`, which follows Claude Code's, but includes cached tokens in the input."""
    messages: dict[str, UsageCount] = {}

    def of(usage: dict[str, Any]) -> UsageCount:
        return UsageCount(
            count(usage.get("input_tokens")), count(usage.get("cache_read_input_tokens")),
            count(usage.get("output_tokens")),
        )  # fmt: skip

    for event in read.events():
        if event.get("type") == "assistant":
            message = table(event.get("message"))
            messages[str(message.get("id"))] = of(table(message.get("usage")))
        elif event.get("type") == "result":
            messages = {"": of(table(event.get("usage")))}
            if event.get("is_error"):
                read.error = str(table(event.get("error")).get("message") or event.get("result") or "error")
    for one in messages.values():
        read.usage.add(one)


def opencode(read: Read) -> None:
    """Read `run --format json`: each `step_finish` has tokens and cost of its step, with cached tokens apart from the
    input.

    The cost is 0 if the price is unknown.
    """
    for event in read.events():
        part = table(event.get("part"))
        if event.get("type") == "step_finish":
            tokens = table(part.get("tokens"))
            cache = table(tokens.get("cache"))
            cached = count(cache.get("read"))
            read.usage.add(
                UsageCount(
                    count(tokens.get("input")) + cached + count(cache.get("write")), cached,
                    count(tokens.get("output")) + count(tokens.get("reasoning")), dollars(part.get("cost")) or None,
                ),
            )  # fmt: skip
        elif event.get("type") == "error":
            error = table(event.get("error"))
            read.error = str(table(error.get("data")).get("message") or error.get("name") or "error")


_AIDER = re.compile(
    r"Tokens: (?P<sent>[\d.,]+[kM]?) sent(?:, (?P<write>[\d.,]+[kM]?) cache write)?"
    r"(?:, (?P<hit>[\d.,]+[kM]?) cache hit)?, (?P<received>[\d.,]+[kM]?) received\."
)
_AIDER_COST = re.compile(r"Cost: \$[\d.]+ message, \$(?P<session>[\d.]+) session\.")
_UNITS = {"k": 1_000, "M": 1_000_000}


def _aider_number(text: str | None) -> int:
    """Parse Aider's rounded numbers, such as 1.2k."""
    if not text:
        return 0
    unit = _UNITS.get(text[-1], 1)
    return round(float(text.rstrip("kM").replace(",", "")) * unit)


def aider(read: Read) -> None:
    """Read a line of tokens after each message, and the cost of the session so far, which may be on the next line."""
    for line in read.lines:
        if found := _AIDER.search(line):
            hit = _aider_number(found["hit"])
            read.usage.add(UsageCount(_aider_number(found["sent"]), hit, _aider_number(found["received"])))
        if found := _AIDER_COST.search(line):
            read.usage.cost_usd = float(found["session"])
        if "litellm." in line and "Error" in line:
            read.error = line.strip()[:1000]


def goose(read: Read) -> None:
    """Read `--output-format stream-json`: the `complete` event has the total. Before 1.37 it was a single number, which
    is counted as input. Cached tokens are included in the input."""
    for event in read.events():
        if event.get("type") == "complete":
            outputs = count(event.get("output_tokens"))
            inputs = count(event.get("input_tokens")) or max(0, count(event.get("total_tokens")) - outputs)
            cached = count(event.get("cache_read_input_tokens"))
            read.usage.add(UsageCount(inputs, cached, outputs, dollars(event.get("cost_usd"))))
        elif event.get("type") == "error":
            read.error = str(event.get("error") or event.get("message") or "error")


def mini_swe_agent(read: Read) -> None:
    """Read its trajectory file, written after each step: the service's usage of every answer, and the cost."""
    try:
        value = table(json.loads("".join(read.lines)))
    except ValueError:
        return
    for message in listed(value.get("messages")):
        usage = table(table(table(table(message).get("extra")).get("response")).get("usage"))
        details = table(usage.get("prompt_tokens_details") or usage.get("input_tokens_details"))
        inputs = count(usage.get("prompt_tokens")) or count(usage.get("input_tokens"))
        outputs = count(usage.get("completion_tokens")) or count(usage.get("output_tokens"))
        read.usage.add(UsageCount(inputs, count(details.get("cached_tokens")), outputs))
    info = table(value.get("info"))
    if cost := dollars(table(info.get("model_stats")).get("instance_cost")):
        read.usage.cost_usd = cost
    status = str(info.get("exit_status") or "")
    if status and status not in ("Submitted", "LimitsExceeded", "TimeExceeded"):
        read.error = f"{status}: {str(info.get('submission') or '')[:500]}".rstrip(": ")


def openhands(read: Read) -> None:
    """Read the events of `--headless --json`. Some versions report an `accumulated_token_usage` of the whole
    conversation, the last of which counts; most report none."""
    last: dict[str, Any] = {}
    for event in read.events():
        last = _find(event, "accumulated_token_usage") or last
        if (cost := dollars(event.get("accumulated_cost"))) is not None:
            read.usage.cost_usd = cost
        if event.get("kind") in ("ConversationErrorEvent", "AgentErrorEvent"):
            read.error = str(event.get("detail") or event.get("error") or event.get("code") or "error")
    read.usage.input_tokens = count(last.get("prompt_tokens"))
    read.usage.cached_tokens = count(last.get("cache_read_tokens"))
    read.usage.output_tokens = count(last.get("completion_tokens"))


def _find(value: Any, key: str) -> dict[str, Any]:
    """Return the first table under `key`, at any depth."""
    fields = table(value)
    if key in fields:
        return table(fields[key])
    for inner in fields.values():
        if isinstance(inner, dict) and (found := _find(inner, key)):
            return found
    return {}

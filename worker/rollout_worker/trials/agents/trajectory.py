"""Writes the conversation of an agent to a file: Harbor's Agent Trajectory Interchange Format, ATIF 1.7.

There is a step for each message; the commands of an answer are its `tool_calls`, and their output is its `observation`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

SCHEMA = "ATIF-v1.7"
PATH = "/logs/agent/trajectory.json"
"""Path in the sandbox, from which a trial's files are taken."""


class Trajectory:
    def __init__(self, name: str, version: str, model: str | None) -> None:
        self._agent = {"name": name, "version": version or "unknown"}
        if model is not None:
            self._agent["model_name"] = model
        self._steps: list[dict[str, Any]] = []

    def said(self, source: str, text: str) -> None:
        """Add a message to the model, of the source `system` or `user`."""
        self._step(source, text)

    def answered(
        self,
        text: str,
        *,
        reasoning: str,
        prompt_tokens: int,
        cached_tokens: int,
        output_tokens: int,
        cost: float | None,
    ) -> None:
        """Add an answer of the model."""
        metrics: dict[str, Any] = {"prompt_tokens": prompt_tokens, "completion_tokens": output_tokens}
        if cached_tokens:
            metrics["cached_tokens"] = cached_tokens
        if cost is not None:
            metrics["cost_usd"] = cost
        step = self._step("agent", text)
        if reasoning:
            step["reasoning_content"] = reasoning
        step["metrics"] = metrics
        step["llm_call_count"] = 1

    def acts(self, scripts: Sequence[str]) -> None:
        """Add the blocks of the last answer, which run one after another."""
        step = self._steps[-1]
        step["tool_calls"] = [
            {"tool_call_id": self._call(number), "function_name": "bash", "arguments": {"command": script}}
            for number, script in enumerate(scripts, 1)
        ]

    def saw(self, number: int, text: str) -> None:
        """Add the result of block `number`, counted from 1, of the last answer."""
        observation = self._steps[-1].setdefault("observation", {"results": []})
        observation["results"].append({"source_call_id": self._call(number), "content": text})

    def encode(self) -> bytes:
        totals = {
            key: sum(step["metrics"].get(name, 0) for step in self._steps if "metrics" in step)
            for key, name in (
                ("total_prompt_tokens", "prompt_tokens"),
                ("total_completion_tokens", "completion_tokens"),
                ("total_cached_tokens", "cached_tokens"),
            )
        }
        costs = [step["metrics"]["cost_usd"] for step in self._steps if "cost_usd" in step.get("metrics", {})]
        final: dict[str, Any] = {**totals, "total_steps": len(self._steps)}
        if costs:
            final["total_cost_usd"] = sum(costs)
        value = {"schema_version": SCHEMA, "agent": self._agent, "steps": self._steps, "final_metrics": final}
        return json.dumps(value, ensure_ascii=False, indent=1).encode("utf-8", "replace")

    def _step(self, source: str, text: str) -> dict[str, Any]:
        step: dict[str, Any] = {
            "step_id": len(self._steps) + 1,
            "timestamp": datetime.now(UTC).isoformat(),
            "source": source,
            "message": text,
        }
        self._steps.append(step)
        return step

    def _call(self, number: int) -> str:
        return f"call_{self._steps[-1]['step_id']}_{number}"

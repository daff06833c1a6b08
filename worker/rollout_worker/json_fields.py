"""Fields of foreign JSON, each with the expected type, or empty if it has another."""

from __future__ import annotations

from typing import Any, cast

from rollout.workloads.json_form import JsonObject


def table(value: Any) -> JsonObject:
    return cast("JsonObject", value) if isinstance(value, dict) else {}


def listed(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def count(value: Any) -> int:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e15 else 0


def dollars(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9 else None


def text(content: Any) -> str:
    """Return a string, or the text of a list of parts."""
    if isinstance(content, list):
        return "".join(text(table(part).get("text")) for part in cast("list[Any]", content))
    return content if isinstance(content, str) else ""

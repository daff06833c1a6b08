"""What each kind of backend does with the keys of a row."""

from __future__ import annotations

FORWARDS = frozenset({"openai"})
"""Kinds that send an OpenAI body on as it is written: their server judges its keys."""

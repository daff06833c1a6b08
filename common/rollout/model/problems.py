"""Combines several faults into one message: `2 problems:`, then each on an indented line, then what concerns all of
them."""

from __future__ import annotations

import re
from collections.abc import Iterable

_HEAD = re.compile(r"([\d,]+) problems:")


def problems(messages: Iterable[str]) -> str:
    """Return one message for all; a message that itself lists several faults is split."""
    count, listed, remarks = 0, list[str](), list[str]()
    for message in messages:
        head, *lines = message.split("\n")
        several = _HEAD.fullmatch(head)
        count += int(several[1].replace(",", "")) if several else 1
        listed += [] if several else [f"  {head}"]
        listed += [line for line in lines if line.startswith("  ")]
        remarks += [line for line in lines if not line.startswith("  ") and line not in remarks]
    if count == 1:
        return "\n".join([listed[0].removeprefix("  "), *listed[1:], *remarks])
    return "\n".join([f"{count:,} problems:", *listed, *remarks])


def faults_of(message: str) -> list[str]:
    """Return the faults that a message lists below a heading that ends with a colon; without a heading, its first
    line."""
    head, *lines = message.split("\n")
    listed = [line.strip() for line in lines if line.startswith("  ")]
    return listed if listed and head.endswith(":") else [head]

"""Shell templates: text with {placeholders}, each of which is replaced by one quoted shell word."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from shlex import quote

# Not ${VARIABLE} of the shell, {{.Id}} of docker, nor { echo; }.
_PLACEHOLDER = re.compile(r"(?<![${])\{([A-Za-z_]+)\}(?!\})")
_IN_QUOTES = re.compile(r"""(["'])\{([a-z_]+)\}\1""")


def placeholders(template: str) -> set[str]:
    return set(_PLACEHOLDER.findall(template))


def check_template(template: str, known: tuple[str, ...], needed: tuple[str, ...]) -> str:
    """Return the template. Raises ValueError with all faults."""
    if not template.strip():
        raise ValueError("must not be empty")
    faults: list[str] = []
    found = placeholders(template)
    for name in sorted(found - set(known)):
        near = get_close_matches(name, known, n=1)
        hint = (
            f"did you mean {{{near[0]}}}?" if near else f"known here: {', '.join(f'{{{k}}}' for k in known) or 'none'}"
        )
        faults.append(f"unknown placeholder {{{name}}}; {hint}")
    faults += [f"{{{name}}} is missing: it must be in there" for name in needed if name not in found]
    for quoted, name in _IN_QUOTES.findall(template):
        if name in known:
            faults.append(f"{{{name}}} is filled in with its quotes: take the {quoted} around it away")
    if faults:
        raise ValueError("; ".join(faults))
    return template


def filled(template: str, values: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), template)


def words(values: Mapping[str, object]) -> dict[str, str]:
    """Quote values as shell words."""
    return {name: quote(str(value)) for name, value in values.items()}

"""Names of secrets and their values: what cannot be a name, and which texts reveal a value."""

from __future__ import annotations

import json
import re
from functools import cache, lru_cache

_TEXT = (
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|$)"
    r"|\b(hf_|sk-|ghp_|gho_|github_pat_|xox[bp]-)[A-Za-z0-9_-]{16,}"
    r"|\b(AKIA|ASIA)[A-Z0-9]{16}\b"
    r"|\brj1\.[a-z]\.[a-z2-7.]{16,}"  # join tokens
    r"|(?<=[Bb]earer )[A-Za-z0-9._~+/-]{16,}=*"
)
_VALUE = (
    r"(?<![A-Za-z0-9])(hf_[A-Za-z0-9]{30,}|sk-(proj-|ant-)?[A-Za-z0-9_-]*[A-Za-z0-9]{20,}|gh[po]_[A-Za-z0-9]{36}"
    r"|github_pat_[A-Za-z0-9]{22}_|xox[bp]-[0-9]{10,}[A-Za-z0-9-]*|(AKIA|ASIA)[A-Z0-9]{16}\b|rj1\.[a-z]\.[a-z2-7.]{16,})"
)
"""Patterns of tokens, as strict as their issuers: names such as `hf_token_for_project_1` do not match.

Patterns are strings, compiled when they are needed, because every command imports this module.
"""
VALUE = (
    "looks like the value of a secret, not its name: write names here, take the value out of the file, and replace the "
    "secret if others could read it"
)
"""Said of such an entry, which is not quoted."""
_RANDOM_MIN = 32  # characters
_PLAIN = r"[A-Za-z0-9+/]+={0,2}"
_ASSIGNMENT = r"[A-Z_][A-Z0-9_]*=.*|=.*|.*=|.*=.*=.*"
_VERSION = r"/versions/[^/#]+$"
_ARN_SUFFIX = r"-[A-Za-z0-9]{6}$"
"""Secrets Manager ends each ARN in a hyphen and six random characters: AWS Secrets Manager user guide, "ARN"."""


SECRET_PREFIX = "ROLLOUT_SECRET_"
"""Prefix of variables whose values are secrets."""
VALUE_MIN = 6
"""Minimum length of a hidden value; hiding shorter ones would damage ordinary text."""


@lru_cache(maxsize=256)
def texts_of(value: str) -> frozenset[str]:
    r"""Return the texts that reveal a secret: the whole and each of its lines, because output is read by lines.

    For a key within JSON (a service account's) they include its lines, where `\n` stands for a line break.
    """
    inner = value.replace("\\r", "").replace("\\n", "\n")
    lines = [line for text in (value, inner) for line in text.splitlines()]
    found = {one.strip() for one in (*lines, value)} | {value}
    return frozenset(one for text in found for one in (text, json.dumps(text)[1:-1]) if len(one) >= VALUE_MIN)


@cache
def secret_text() -> re.Pattern[str]:
    """Return the pattern of a token or a private key within a text."""
    return re.compile(_TEXT, re.DOTALL)


def is_value(entry: str) -> bool:
    """Return whether `entry` looks like a secret and not like a name: a token's form, a space, an assignment, or a long
    run of letters and digits without a word."""
    if (
        re.search(r"\s", entry)
        or re.fullmatch(_ASSIGNMENT, entry)
        or (re.search(_VALUE, entry) and re.search(r"\d", entry))
    ):
        return True
    if len(entry) < _RANDOM_MIN or re.fullmatch(_PLAIN, entry) is None:
        return False
    longest = max(entry.split("/"), key=len)
    return len(longest) >= _RANDOM_MIN and bool(re.search(r"\d", longest)) and bool(re.search(r"[A-Za-z]", longest))


def value_faults(entries: list[str]) -> str:
    """Return the fault of a list of names some of which are values, or an empty string. It quotes no entry."""
    wrong = [f"entry {number}" for number, entry in enumerate(entries, 1) if is_value(entry)]
    if not wrong:
        return ""
    return f"{', '.join(wrong)}: {VALUE}"


def variable_of(name: str) -> str:
    """Return the environment variable of a provider's secret: HF_TOKEN for `rollout/hf-token`, DB_USER for
    `rollout/db#user`."""
    path, _, key = name.partition("#")
    path = re.sub(_VERSION, "", path)
    if path.startswith("arn:"):
        path = re.sub(_ARN_SUFFIX, "", path.rpartition(":")[2])
    words = [path.rstrip("/").rpartition("/")[2], *([key] if key else [])]
    found = re.sub(r"[^A-Z0-9]+", "_", "_".join(words).upper()).strip("_")
    return f"_{found}" if found[:1].isdigit() else found


_OF_THE_PROCESS = frozenset(
    {
        "PATH", "HOME", "SHELL", "IFS", "ENV", "BASH_ENV", "TMPDIR", "LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT",
        "DYLD_INSERT_LIBRARIES", "DYLD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES",
    }
)  # fmt: skip


def variable_fault(name: str) -> str:
    """Return the fault of the variable of a provider's secret, or an empty string."""
    variable = variable_of(name)
    if variable in _OF_THE_PROCESS or re.fullmatch(r"PYTHON[A-Z]+|ROLLOUT_.*", variable):
        return (
            f"{name!r} would be the variable {variable}, by which executors' processes are started: give the secret "
            "another name"
        )
    return ""

"""Names of secrets: what cannot be one, and the environment variable that a secret is handed on in."""

from __future__ import annotations

import re

SECRET_TEXT = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|$)"
    r"|\b(hf_|sk-|ghp_|gho_|github_pat_|xox[bp]-)[A-Za-z0-9_-]{16,}"
    r"|\b(AKIA|ASIA)[A-Z0-9]{16}\b"
    r"|\brj1\.[a-z]\.[a-z2-7.]{16,}"  # join tokens
    r"|(?<=[Bb]earer )[A-Za-z0-9._~+/-]{16,}=*",
    re.DOTALL,
)
"""What has the form of a token or of a private key."""
VALUE = (
    "looks like the value of a secret, not its name: write names here, take the value out of the file, and replace the "
    "secret if others could read it"
)
"""Said of such an entry, which is not quoted."""
_RANDOM_MIN = 32  # characters
_PLAIN = re.compile(r"[A-Za-z0-9+/]+={0,2}")
_VERSION = re.compile(r"/versions/[^/#]+$")
_ARN_SUFFIX = re.compile(r"-[A-Za-z0-9]{6}$")
"""Secrets Manager ends each ARN in a hyphen and six random characters: AWS Secrets Manager user guide, "ARN"."""


def is_value(entry: str) -> bool:
    """Whether `entry` looks like a secret itself, not like the name of one: a token's prefix, a space, `=`, or a long
    run of letters and digits without a word in it."""
    if re.search(r"[\s=]", entry) or (SECRET_TEXT.search(entry) and re.search(r"\d", entry)):
        return True
    if len(entry) < _RANDOM_MIN or _PLAIN.fullmatch(entry) is None:
        return False
    longest = max(entry.split("/"), key=len)
    return len(longest) >= _RANDOM_MIN and bool(re.search(r"\d", longest)) and bool(re.search(r"[A-Za-z]", longest))


def value_faults(entries: list[str]) -> str:
    """What is wrong with a list of names of which some are values; empty: nothing. Quotes no entry."""
    wrong = [f"entry {number}" for number, entry in enumerate(entries, 1) if is_value(entry)]
    if not wrong:
        return ""
    return f"{', '.join(wrong)}: {VALUE}"


def variable_of(name: str) -> str:
    """The environment variable of a provider's secret: `rollout/hf-token` is HF_TOKEN, `rollout/db#user` is DB_USER."""
    path, _, key = name.partition("#")
    path = _VERSION.sub("", path)
    if path.startswith("arn:"):
        path = _ARN_SUFFIX.sub("", path.rpartition(":")[2])
    words = [path.rstrip("/").rpartition("/")[2], *([key] if key else [])]
    found = re.sub(r"[^A-Z0-9]+", "_", "_".join(words).upper()).strip("_")
    return f"_{found}" if found[:1].isdigit() else found

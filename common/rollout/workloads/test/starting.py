"""A first offload.toml for a project."""

from __future__ import annotations

import json
from pathlib import Path

from rollout.workloads.test.config import FrameworkType

_OF_PYTEST = ("pyproject.toml", "pytest.ini", "tox.ini", "setup.cfg", "setup.py", "conftest.py")
_TEXT = """\
# Tests of this project: `rollout test run`. All keys are in docs/configuration.md of Rollout.

[provider]
{provider}

[framework]
type = "{framework}"
{more}
[groups.all]
retry_count = 1        # further tries of a test that fails, in a fresh process

[report]
output_dir = "test-results"    # results.jsonl, junit.xml, trace.json, history.db
# fail_on_flaky = true         # exit with 3 if no test failed and some were flaky

# [[quarantine]]               # a test that may fail until a day
# id = "tests/test_a.py::test_flaky"
# until = 2027-01-31
# reason = "issue 17"
"""

_IMAGE = 'image = "python:3.12"'
_PROVIDERS = {
    "local": 'type = "local"                 # in place; "process" and "bubblewrap" work in copies of the project',
    **{name: f'type = "{name}"\n{_IMAGE}' for name in ("docker", "podman", "kubernetes", "modal")},
    "default": """type = "default"
prepare_command = "./image.sh"                   # prints an image id as its last line
create_command = "./create.sh {image_id}"        # prints a sandbox id
exec_command = "./exec.sh {sandbox_id} {command}"
download_command = "./download.sh {sandbox_id} {paths}"
destroy_command = './destroy.sh {sandbox_id}'
""".rstrip(),
}


def guess(root: Path) -> FrameworkType:
    """Guess the framework of the project."""
    if any((root / name).is_file() for name in _OF_PYTEST):
        return "pytest"
    if (root / "Cargo.toml").is_file():
        return "cargo"
    if (root / "go.mod").is_file():
        return "go"
    return _of_package(root / "package.json") or "pytest"


def _of_package(path: Path) -> FrameworkType | None:
    """Return the framework among a package's dependencies, or None if there is no such package or framework."""
    try:
        package = json.loads(path.read_text("utf-8", "replace"))
        named = {**package.get("dependencies", {}), **package.get("devDependencies", {})}
    except (OSError, ValueError, AttributeError, TypeError):
        return None
    return "vitest" if "vitest" in named else "jest" if "jest" in named else None


def first_file(framework: str, provider: str) -> str:
    """Return the text of offload.toml. It runs the tests that also run without it, if the framework finds them
    itself."""
    more = ""
    if framework == "default":
        more = (
            'discover_command = "ls tests/*.sh"          # prints an id a line\n'
            'run_command = "./run-tests {tests} > {result_file}"\n'
            'result_file = "results.xml"                 # JUnit XML\n'
        )
    return _TEXT.format(provider=_PROVIDERS.get(provider, f'type = "{provider}"'), framework=framework, more=more)

"""offload.toml: the public tool's files, ours, and broken ones; and where a project is."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from rollout.config.load import load_settings
from rollout.model.errors import ConfigError
from rollout.workloads.code import read_code
from rollout.workloads.test.config import FrameworkSection, TestConfig
from rollout.workloads.test.project import dot_files, find_project, find_python, passed_over
from rollout.workloads.test.starting import first_file, guess
from rollout.workloads.test.workload import Test

PUBLIC = """
[offload]
max_parallel = 4
test_timeout_secs = 600
sandbox_project_root = "/app"
sandbox_repo_root = "/app"
sandbox_init_cmd = "uv sync"
post_patch_cmd = "make"

[provider]
type = "default"
prepare_command = "uv run @modal_sandbox.py prepare"
create_command = "create {image_id}"
exec_command = "exec {sandbox_id} {command}"
destroy_command = "destroy {sandbox_id}"
download_command = "download {sandbox_id} {paths}"
timeout_secs = 600
copy_dirs = [".:/app"]
[provider.env]
A = "1"

[framework]
type = "pytest"
paths = ["tests"]
command = "uv run pytest"
run_args = "--no-cov"
test_id_format = "{name}"

[groups.fast]
retry_count = 1
filters = "-m 'not slow'"
[groups.slow]
filters = "-m slow"
schedule_individual = true

[report]
output_dir = "out"
junit_file = "all.xml"

[history]
path = "offload-history.jsonl"

[checkpoint]
build_inputs = ["Dockerfile"]
"""
BROKEN = """
[offload]
max_parallel = 0
stream = true
[provider]
type = "dokcer"
[framework]
type = "pytst"
[groups.all]
retry = 1
filters = "-k 'a"
[[quarantine]]
id = "x"
until = "soon"
"""


def load(root: Path, text: str) -> TestConfig:
    (root / "offload.toml").write_text(text)
    return load_settings(TestConfig, root / "offload.toml")


def faults(root: Path, text: str) -> dict[str, str]:
    """By place."""
    with pytest.raises(ConfigError) as raised:
        load(root, text)
    lines = [line.strip() for line in raised.value.message.splitlines() if "offload.toml:" in line]
    return {":".join(line.split(":")[1:3]).replace(" ", ""): line for line in lines}


def test_a_file_of_the_public_tool_is_read_and_what_has_no_effect_is_told_by_key(tmp_path: Path) -> None:
    settings = load(tmp_path, PUBLIC)
    assert settings.groups["fast"].words == ["-m", "not slow"] and settings.groups["slow"].schedule_individual
    assert settings.offload.test_timeout_secs == 600 and settings.provider.env == {"A": "1"}
    told = [line.partition(" ")[0] for line in settings.unsupported()]
    assert told == ["checkpoint.build_inputs", "offload.post_patch_cmd", "history.path"]


@pytest.mark.parametrize(("command", "at_once"), [("run {tests}", 1), ("run {tests} > {result_file}", 4)])
def test_batches_that_write_the_same_file_run_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, at_once: int
) -> None:
    text = '[offload]\nmax_parallel = 4\n[framework]\ntype = "default"\ndiscover_command = "ls"\n'
    (tmp_path / "offload.toml").write_text(f'{text}run_command = "{command}"\nresult_file = "results.xml"\n')
    monkeypatch.chdir(tmp_path)
    workload = Test()
    settings = workload.load(None)
    assert workload.at_once(settings) == 4  # elsewhere, each slot has a copy
    workload.works_here()
    assert workload.at_once(settings) == at_once


def test_a_time_limit_is_an_option(tmp_path: Path) -> None:
    (tmp_path / "offload.toml").write_text("")
    for given, seconds in (("2.5", 2.5), ("90", 90.0)):
        settings = load_settings(TestConfig, tmp_path / "offload.toml", {"offload.test_timeout_secs": given})
        assert settings.offload.test_timeout_secs == seconds


def test_all_faults_are_told_with_their_lines(tmp_path: Path) -> None:
    found = faults(tmp_path, BROKEN)
    assert list(found) == [
        "3:offload.max_parallel", "4:offload.stream", "6:provider.type", "8:framework.type", "10:groups.all.retry",
        "11:groups.all.filters", "14:quarantine.0.until",
    ]  # fmt: skip
    assert "docker" in found["6:provider.type"] and "pytest" in found["8:framework.type"]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('[provider]\ntype = "local"\nimage = "a"', "3:provider.image"),
        ('[provider]\ntype = "default"\ncreate_command = "a"', "1:provider.exec_command"),
        ('[provider]\ntype = "process"\ncopy_dirs = ["a"]', "3:provider.copy_dirs"),
        ('[framework]\ntype = "go"\nmarkers = "a"', "3:framework.markers"),
        ('[framework]\ntype = "default"', "1:framework.discover_command"),
        ('[framework]\npython = "a"\ncommand = "pytest"', "2:framework.python"),
        ("[groups]", "1:groups"),
        ('[report]\njunit_file = "../a"', "2:report.junit_file"),
        ('[report]\ndownload_globs = ["/etc/*"]', "2:report.download_globs"),
        ("[report]\ndownload_globs = ['\\']", "2:report.download_globs"),
    ],
)
def test_keys_that_do_not_fit_each_other(tmp_path: Path, text: str, place: str) -> None:
    assert place in faults(tmp_path, text)


@pytest.mark.parametrize("output", [".", "..", "/"])
def test_the_output_directory_is_not_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str) -> None:
    (tmp_path / "offload.toml").write_text(f'[report]\noutput_dir = "{output}"')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"offload\.toml:2: report\.output_dir"):
        Test().load(None)


def test_a_project_is_the_nearest_directory_with_a_file_by_which_one_is_known(tmp_path: Path) -> None:
    inner = tmp_path / "repository" / "package" / "tests"
    inner.mkdir(parents=True)
    (tmp_path / "offload.toml").touch()  # of another project
    (tmp_path / "repository" / ".git").mkdir()
    assert find_project(inner).root == inner
    (inner.parent / "pyproject.toml").touch()
    assert find_project(inner).root == inner.parent and find_project(inner).file is None
    (tmp_path / "repository" / "offload.toml").touch()
    assert find_project(inner).file == tmp_path / "repository" / "offload.toml"
    assert find_project(inner, Path(tmp_path, "offload.toml")).root == tmp_path


def test_the_interpreter_is_that_of_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interpreter(path: Path, code: int) -> str:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\nexit {code}\n")
        path.chmod(0o755)
        return str(path)

    monkeypatch.setenv("PATH", str(tmp_path / "bin") + os.pathsep + os.environ["PATH"])
    on_path = interpreter(tmp_path / "bin" / "python", 0)
    interpreter(tmp_path / "bin" / "uv", 0)
    assert find_python(tmp_path, FrameworkSection()) == (on_path,)
    interpreter(tmp_path / ".venv" / "bin" / "python", 0)
    assert find_python(tmp_path, FrameworkSection()) == (".venv/bin/python",)
    assert passed_over(tmp_path, (".venv/bin/python",)) == ""
    interpreter(tmp_path / ".venv" / "bin" / "python", 1)  # has no pytest
    assert find_python(tmp_path, FrameworkSection()) == (on_path,)
    assert passed_over(tmp_path, (on_path,)) == ".venv/bin/python"
    for command, words in {"uv run pytest": ("uv", "run", "python"), "python -m pytest": ("python",)}.items():
        assert find_python(tmp_path, FrameworkSection(command=command)) == words
    for wrong in (FrameworkSection(command="make test"), FrameworkSection(python=".venv/bin/python")):
        with pytest.raises(ConfigError, match=r"^framework\.(command|python): "):
            find_python(tmp_path, wrong)
    with pytest.raises(ConfigError, match=r"^framework\.python: there is no program"):
        find_python(tmp_path, FrameworkSection(python="nope/python"))


def test_hidden_files_of_the_project_travel_from_its_top(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    for name in (".coveragerc", ".tracked", ".other", ".venv/a.py", "below/.coveragerc", "a.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    subprocess.run(["git", "add", "-f", ".tracked", "below/.coveragerc"], cwd=tmp_path, check=True)
    assert [name for name, _ in read_code(tmp_path, hidden=dot_files(tmp_path)).files] == [
        ".coveragerc", ".tracked", "a.py",
    ]  # fmt: skip


def test_a_first_file_fits_the_project_and_is_whole(tmp_path: Path) -> None:
    (tmp_path / "package.json").write_text('{"devDependencies": {"vitest": "1"}}')
    assert guess(tmp_path) == "vitest"
    (tmp_path / "Cargo.toml").touch()
    assert guess(tmp_path) == "cargo"
    for framework in ("pytest", "cargo", "vitest", "jest", "go", "default"):
        for provider in ("local", "bubblewrap", "docker", "modal", "default"):
            settings = load(tmp_path, first_file(framework, provider))
            assert (settings.framework.type, settings.provider.type) == (framework, provider)

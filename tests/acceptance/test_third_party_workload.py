"""A workload of somebody else's package, installed from a directory, is a workload like ours."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from acceptance_cli import Cli, until

SAMPLE = Path(__file__).parent / "sample_workload"
TEXTS = 120


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(SAMPLE)], check=True, timeout=100)
    return target


@pytest.fixture
def counting(cli: Cli, installed: Path) -> Cli:
    """A file of texts, one of them without words, and its configuration."""
    cli.env["PYTHONPATH"] = str(installed)
    texts = [" ".join(["word"] * (n % 5 + 1)) if n != 7 else " " for n in range(TEXTS)]
    (cli.directory / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (cli.directory / "count.toml").write_text(
        '[input]\nglob = "in.jsonl"\n[output]\ndir = "out"\n[count]\ndelay_ms = 30\n'
    )
    return cli


def lines(cli: Cli, name: str) -> list[dict[str, object]]:
    path = cli.directory / "out" / name
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def test_it_is_at_most_100_lines() -> None:
    assert sum(len(file.read_text().splitlines()) for file in SAMPLE.rglob("*.py")) <= 100


@pytest.mark.slow
def test_it_runs_with_progress_goes_on_after_a_kill_and_reports_what_failed(counting: Cli) -> None:
    command = ("count", "run", "--config", "count.toml")
    process = counting.start(*command, "--workers", "2")
    until(lambda: len(lines(counting, "counts.jsonl")) > 20 or process.poll() is not None, "20 texts")
    process.kill()
    process.communicate()
    assert 20 < len(lines(counting, "counts.jsonl")) < TEXTS - 1
    done = counting.run(*command, "--json")
    assert done.code == 0, done
    opened, progress, summary = (done.event(name) for name in ("run_opened", "progress", "summary"))
    assert opened["resumed"] is True and opened["texts"] == progress["texts"] == TEXTS
    assert {"texts_per_s", "characters_per_s", "eta_s", "workers"} <= progress.keys()
    assert summary["texts"]["completed"] == TEXTS - 1 and summary["texts"]["failed"] == 1
    assert summary["characters_per_s"] > 0 and list(summary["files"]) == [
        "counts.jsonl",
        "errors.jsonl",
        "summary.json",
    ]
    counts = lines(counting, "counts.jsonl")
    assert [(count["row"], count["words"]) for count in counts] == [(n + 1, n % 5 + 1) for n in range(TEXTS) if n != 7]
    assert lines(counting, "errors.jsonl") == [{"row": 8, "text": " ", "code": "no_words"}]

    again = counting.run(*command)
    assert again.code == 0 and f"is complete already: {TEXTS - 1} counts, 1 failed, in out" in again.out
    (counting.directory / "in.jsonl").write_text('{"text": "another"}\n')
    other = counting.run(*command)
    assert other.code == 2 and "(in.jsonl:1)" in other.err


def test_it_is_known_to_help_to_plan_and_to_the_dry_run(counting: Cli) -> None:
    assert "Count the words of texts." in counting.run("--help").out
    assert "--separator" in counting.run("count", "run", "--help").out
    plan = counting.run("plan", "--config", "count.toml")
    assert plan.out.splitlines() == [
        "count.toml: a valid count configuration",
        f"  writes counts.jsonl, errors.jsonl and summary.json of {TEXTS} texts to out",
    ]
    assert counting.run("count", "run", "--config", "count.toml", "--dry-run").out.endswith(
        "dry-run OK: inputs=120 workers=1\n"
    )
    assert not (counting.directory / "out").exists()


def test_one_that_is_broken_is_named_and_breaks_nothing_else(cli: Cli) -> None:
    info = cli.directory / "site" / "broken_workload-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-workload\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rollout.workloads]\nbroken = nowhere.at_all:Broken\n")
    cli.env["PYTHONPATH"] = str(info.parent)
    why = "the workload broken of broken-workload cannot be loaded from nowhere.at_all:Broken: ModuleNotFoundError"
    shown = cli.run("--help")
    assert shown.code == 0 and "the workload broken of broken-workload cannot be loaded" in " ".join(shown.out.split())
    assert cli.run("version").err == ""
    failed = cli.run("broken", "run", "--config", "x.toml")
    assert failed.code == 1 and failed.err.startswith(f"error [plugin]: {why}") and failed.err.count("\n") == 1
    cli.rows(2)
    plan = cli.run("plan", "--config", str(cli.config()))
    assert plan.code == 0 and "a valid infer configuration" in plan.out and f"warning: {why}" in plan.err


def test_commands_of_its_own_are_found_in_its_package_and_may_be_broken_too(cli: Cli) -> None:
    site = cli.directory / "site"
    info, package = site / "own-1.0.dist-info", site / "own" / "commands"
    for directory in (info, package):
        directory.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rollout.workloads]\nown = own.workload:Own\n")
    (package / "__init__.py").write_text(
        "from rollout.workloads.registered import Command\n"
        "COMMANDS = {'own': Command('Greet.', 'own.commands.own:hello'), 'torn': Command('Tear.', 'own.torn:app')}\n"
    )
    (package / "own.py").write_text('def hello() -> None:\n    """Greet."""\n    print("hello")\n')
    cli.env["PYTHONPATH"] = str(site)
    assert {"own Greet.", "torn Tear."} <= {" ".join(line.split()) for line in cli.run("--help").out.splitlines()}
    assert cli.run("own").out == "hello\n"
    torn = cli.run("torn")
    assert torn.code == 1 and "error [plugin]: " in torn.err and "own.torn:app: ModuleNotFoundError" in torn.err
    (package / "__init__.py").write_text("COMMANDS = 1 / 0\n")
    torn = cli.run("own")
    assert torn.code == 1 and "the commands of the workload own cannot be loaded from own.commands" in torn.err

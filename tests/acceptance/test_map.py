"""`rollout map` as a user meets it: functions that misbehave, code that cannot be loaded, processes that are killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from acceptance_cli import Cli, until

MISBEHAVING = """
import ctypes, os, sys, time

def act(row):
    match row.get("do", ""):
        case "raise": raise ValueError(f"bad {row['n']}")
        case "hang": time.sleep(1000)
        case "fork":
            if os.fork() == 0:
                time.sleep(1000)
        case "fork-returns": os.fork()
        case "print":
            for _ in range(64): sys.stdout.write("x" * (1 << 20))
        case "bytes": return {"a": [1, b"x"]}
        case "segv": ctypes.string_at(0)
        case "exit": sys.exit(3)
        case "_exit": os._exit(4)
        case "import": import no_such_module
    return row["n"] * 2
"""
ERRORS = {
    "raise": ("ValueError", "bad 10"),
    "hang": ("TimeoutError", "still running after 4 s"),
    "bytes": ("TypeError", "result['a'][1] is a bytes"),
    "segv": ("ProcessDied", "SIGSEGV"),
    "exit": ("SystemExit", "sys.exit(3)"),
    "_exit": ("ProcessDied", "exit code 4"),
    "import": ("ModuleNotFoundError", "no_such_module"),
}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def written(path: Path, count: int, process: subprocess.Popen[str]) -> bool:
    """So many lines, or the process has ended."""
    return process.poll() is not None or (path.exists() and path.read_bytes().count(b"\n") >= count)


def write_rows(cli: Cli, rows: list[Any]) -> None:
    (cli.directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_rows_that_misbehave_cost_themselves_only(cli: Cli) -> None:
    (cli.directory / "package").mkdir()
    (cli.directory / "package" / "__init__.py").touch()
    (cli.directory / "package" / "functions.py").write_text(MISBEHAVING)
    doings = [*ERRORS, "fork", "fork-returns", "print"]
    rows = [{"n": n, "do": doings[n // 10 - 1]} if n % 10 == 0 and 0 < n <= 100 else {"n": n} for n in range(300)]
    write_rows(cli, rows)
    command = ["map", "package.functions:act", "--input", "rows.jsonl", "--output", "out", "--timeout", "4s"]
    found = cli.run(*command, "--max-attempts", "1", "--workers", "2", "--json")
    assert found.code == 0, found.err
    results, errors = lines(cli.directory / "out" / "results.jsonl"), lines(cli.directory / "out" / "errors.jsonl")
    failed = {10 * (k + 1) + 1: doing for k, doing in enumerate(ERRORS)}
    assert {line["row"]: line["result"] for line in results} == {
        n + 1: 2 * n for n in range(300) if n + 1 not in failed
    }
    assert [line["row"] for line in results] == sorted(line["row"] for line in results)
    assert [line["row"] for line in errors] == list(failed)
    for line, (kind, message) in zip(errors, ERRORS.values(), strict=True):
        assert line["type"] == kind and message in line["message"], line
        assert line["input"] == rows[line["row"] - 1]
        if kind in ("ValueError", "TimeoutError", "ModuleNotFoundError") or message == "SIGSEGV":
            assert "package/functions.py" in line["traceback"], line
    summary = json.loads((cli.directory / "out" / "summary.json").read_text())
    assert summary["rows"]["completed"] == 293 and summary["rows"]["failed"] == 7

    (cli.directory / "again.jsonl").touch()  # beside the code, where no run was begun
    again = cli.run(*command, "--max-attempts", "1", "--json")
    assert again.code == 0 and again.event("summary")["rows"]["committed"] == 300
    assert "no part of this run: again.jsonl" in again.out
    (cli.directory / "package" / "functions.py").write_text(MISBEHAVING + "\n")
    refused = cli.run(*command)
    assert refused.code == 2 and "changed: package/functions.py" in refused.err


@pytest.mark.slow
def test_code_that_cannot_be_loaded_is_told_at_once_and_when_it_is_mended_it_is_another_run(cli: Cli) -> None:
    code = cli.directory / "functions.py"
    code.write_text("import no_such_module\ndef double(n):\n    return 2 * n\n")
    write_rows(cli, list(range(20_000)))
    command = ["map", "functions:double", "--input", "rows.jsonl", "--output", "out"]
    began = time.monotonic()
    found = cli.run(*command)
    assert found.code == 1 and time.monotonic() - began < 60
    assert "functions imports 'no_such_module'" in found.out and "install it" in found.out
    assert 'File "functions.py", line 1' in found.out
    assert (
        "20,000 rows are unharmed" in found.out
        and "the code that is mended, the same command starts another" in found.out
    )
    run_id = (cli.directory / "out" / "run-id").read_text()
    (cli.directory / "no_such_module.py").touch()
    found = cli.run(*command)
    assert found.code == 0 and "(new: no_such_module.py)" in found.out
    assert (cli.directory / "out" / "run-id").read_text() != run_id
    assert [line["result"] for line in lines(cli.directory / "out" / "results.jsonl")] == [2 * n for n in range(20_000)]


def test_faults_of_the_code_and_of_the_rows_are_all_told_before_anything_starts(cli: Cli) -> None:
    (cli.directory / "functions.py").write_text("def double(n):\n    return n\n")
    (cli.directory / "bad.jsonl").write_text("1\n{\n2\nnope\n")
    found = cli.run("map", "functions:duoble", "--input", "bad.jsonl", "--output", "out")
    assert found.code == 2
    for text in ("defines no 'duoble'; did you mean double?", "bad.jsonl:2", "bad.jsonl:4"):
        assert text in found.err
    assert not (cli.directory / "out").exists()
    found = cli.run("map", "functions:double")
    assert found.code == 2 and "error [config_invalid]: --input and --output " in found.err


def test_rows_that_hang_are_cancelled_or_get_a_time_limit(cli: Cli) -> None:
    (cli.directory / "functions.py").write_text(MISBEHAVING)
    write_rows(cli, [{"n": 1}, {"n": 2, "do": "hang"}, {"n": 3, "do": "hang"}])
    command = ("map", "functions:act", "--input", "rows.jsonl", "--output", "out", "--workers", "2")
    process = cli.start(*command)
    until(partial(written, cli.directory / "out" / "results.jsonl", 1, process), "a result", 60)
    cancelled = json.loads(cli.run("item", "cancel", "@last", "2", "--reason", "it hangs", "--json").out)
    assert (cancelled["row"], cancelled["code"]) == (2, "cancelled")
    time.sleep(6)  # until Ctrl-C says how to end what hangs
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "--timeout" in out and "rollout item cancel" in out, out
    (listed,) = json.loads(cli.run("run", "list", "--private", "--json").out)["runs"]
    assert (listed["state"], listed["done"], listed["dir"]) == ("interrupted", 1, str(cli.directory / "out"))
    shutil.copytree(cli.directory / "out", cli.directory / "copy", ignore=shutil.ignore_patterns(".rollout"))
    found = cli.run(*command[:-3], "copy")
    assert found.code == 2 and "copy/.rollout" in found.err and not (cli.directory / "copy/.rollout").exists()
    found = cli.run(*command, "--timeout", "1s", "--max-attempts", "1")
    assert found.code == 0 and "--timeout: 0.0 -> 1.0" in found.out, found
    errors = lines(cli.directory / "out" / "errors.jsonl")
    assert [(line["row"], line["code"]) for line in errors] == [(2, "cancelled"), (3, "timeout")]
    assert "it hangs" in errors[0]["message"]
    kept = {path.name for path in (cli.directory / "out" / ".rollout").iterdir()}
    assert {"rollout.db", "objects", "logs"} <= kept and not kept & {"cache", "cache-trees", "scratch"}
    assert json.loads(cli.run("item", "show", "@last", "1", "--json").out)["output"] == 2


def test_every_row_once_though_workers_and_coordinator_are_killed_twice(cli: Cli) -> None:
    (cli.directory / "functions.py").write_text("import time\ndef f(n):\n    time.sleep(0.001)\n    return n\n")
    write_rows(cli, list(range(6_000)))
    process = cli.start("map", "functions:f", "--input", "rows.jsonl", "--output", "out", "--workers", "2")
    results = cli.directory / "out" / "results.jsonl"
    for share in (600, 2_700):
        until(partial(written, results, share, process), f"{share} results", 90)
        assert process.poll() is None, process.communicate()
        children = json.loads((cli.directory / "out" / ".rollout" / "children.json").read_text())
        for pid, _ in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, (out, err)
    assert [(line["row"], line["result"]) for line in lines(results)] == [(n + 1, n) for n in range(6_000)]
    assert not (cli.directory / "out" / "errors.jsonl").read_text()


def test_what_was_printed_is_kept_though_the_command_is_killed(cli: Cli) -> None:
    work = "import time\ndef f(n):\n    print(f'row {n}')\n    time.sleep(0.001)\n    return n\n"
    (cli.directory / "functions.py").write_text(work)
    write_rows(cli, list(range(2_000)))
    command = ("map", "functions:f", "--input", "rows.jsonl", "--output", "out", "--workers", "2")
    process = cli.start(*command)
    until(partial(written, cli.directory / "out" / "results.jsonl", 600, process), "600 results", 60)
    process.kill()
    process.communicate()
    found = cli.run(*command, "--resume", "@last")
    assert found.code == 0, found
    printed = [json.loads(line) for line in cli.run("logs", "@last", "--json").out.splitlines()]
    missing = {f"row {n}" for n in range(2_000)} - {line.get("text") for line in printed}
    assert len(missing) <= sum(line["left_out"]["lines"] for line in printed if "left_out" in line), len(missing)


def test_what_is_printed_is_shown_as_it_comes_once(cli: Cli) -> None:
    (cli.directory / "functions.py").write_text("def f(n):\n    print('hello from', n)\n    return n\n")
    write_rows(cli, list(range(3)))
    command = ("map", "functions:f", "--input", "rows.jsonl", "--output", "out", "--workers", "auto", "--show-output")
    found = cli.run(*command, "--json")
    told = [json.loads(line) for line in found.out.splitlines()]
    shown = sorted((one["row"], one["text"]) for one in told if one["event"] == "output")
    assert shown == [(n + 1, f"hello from {n}") for n in range(3)]
    again = cli.run(*command)
    assert again.code == 0 and "hello" not in again.out


def test_files_named_as_modules_stand_in_nobodys_way(cli: Cli) -> None:
    names = {name for name in {*sys.stdlib_module_names, *packages_distributions()} if name.isidentifier()}
    for name in names:
        (cli.directory / f"{name}.py").write_text(f"raise ImportError({name!r})\n")
    (cli.directory / "own.py").write_text("def double(n):\n    return 2 * n\n")
    work = "import asyncio, logging, queue, random, secrets, types, own\nasync def f(n):\n    return own.double(n)\n"
    (cli.directory / "work.py").write_text(work)
    write_rows(cli, [1, 2])
    found = cli.run("map", "work:f", "--input", "rows.jsonl", "--output", "out")
    assert found.code == 0, found.err
    assert [line["result"] for line in lines(cli.directory / "out" / "results.jsonl")] == [2, 4]
    assert "__future__.py" in found.out  # the first of those that are not imported
    refused = cli.run("map", "queue:f", "--input", "rows.jsonl", "--output", "other")
    assert refused.code == 2 and "rename this one" in refused.err
    cli.rows(3)
    cli.config(output={"dir": "batch"})
    assert cli.run("infer", "batch", "--config", "batch.toml").code == 0

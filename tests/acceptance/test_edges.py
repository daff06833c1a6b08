"""What goes in comes out, as a user meets it: streams, files that change, patterns that reach too far, results that
somebody damages. Each ends in all rows or in a clear error, then in all rows by the same command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import prefork
import pytest
from acceptance_cli import ROLLOUT, Cli, Finished, until
from rollout.cli.boundary import FAILED, INTERRUPTED, OK, USAGE

ROWS = 60
ROWS_AHEAD = 20_000
"""Of 2 KB each: more than a client reads ahead of what is acknowledged."""


def batch(cli: Cli, config: Path, stdin: bytes | None = None) -> Finished:
    """With `stdin` on standard input, by way of a pipe; without: /dev/null."""
    command = [ROLLOUT, "infer", "batch", "--config", str(config), "--json"]
    done = prefork.run(command, cwd=cli.directory, input=stdin, timeout=120)
    assert b"Traceback" not in done.stderr, done.stderr
    return Finished(done.returncode, done.stdout.decode(), done.stderr.decode())


def text(cli: Cli, count: int = ROWS) -> bytes:
    path = cli.rows(count, "made.jsonl")
    data = path.read_bytes()
    path.unlink()
    return data


def whole(cli: Cli, output: str = "out", count: int = ROWS) -> None:
    assert [row["n"] for row in cli.completions(output)] == list(range(count))
    assert json.loads((cli.directory / output / "summary.json").read_text())["rows"]["completed"] == count


def test_standard_input(cli: Cli) -> None:
    config, rows = cli.config(input={"glob": "-"}), text(cli)
    assert "error [input_invalid]: the input is empty: " in batch(cli, config).err
    assert not (cli.directory / "out").exists()
    done = batch(cli, config, rows)
    assert done.code == OK, done
    whole(cli)
    for again in (None, rows):  # not needed again, and welcome if it is the same
        done = batch(cli, config, again)
        assert done.code == OK and done.event("summary")["rows"]["completed"] == ROWS, done
    changed = batch(cli, config, rows.replace(b"row 7", b"row x"))
    assert changed.code == USAGE and "<stdin>:8: " in changed.err
    whole(cli)


def test_other_names_of_streams(cli: Cli) -> None:
    """/dev/stdin, a process substitution and a named pipe, read together."""
    (cli.directory / "rows").write_bytes(text(cli))
    os.mkfifo(cli.directory / "pipe")
    config = cli.config(input={"glob": ["/dev/stdin", "/dev/fd/9", "pipe"]})
    script = (
        "(tail -n +41 rows > pipe) & head -n 20 rows | "
        f'"{ROLLOUT}" infer batch --json --config "{config}" 9< <(head -n 40 rows | tail -n +21)'
    )
    done = subprocess.run(["bash", "-c", script], cwd=cli.directory, capture_output=True, timeout=120, text=True)
    assert done.returncode == OK, done
    whole(cli)
    again = batch(cli, config)
    assert again.code == OK and "/dev/fd/9 is not read again" in again.out and "nothing came from pipe" in again.out
    whole(cli)


def test_a_pipe_that_nobody_writes_to_says_so_and_can_be_interrupted(cli: Cli) -> None:
    os.mkfifo(cli.directory / "pipe")
    log = cli.directory / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [ROLLOUT, "infer", "batch", "--config", str(cli.config(input={"glob": "pipe"}))],
            cwd=cli.directory,
            stdout=out,
            stderr=out,
        )
    until(lambda: "waiting for somebody to write to pipe" in log.read_text(), "the line that says so")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == INTERRUPTED and "interrupted before anything was submitted" in log.read_text()
    assert not (cli.directory / "out").exists()


def when_opened(cli: Cli, config: Path, change: Any) -> Finished:
    """`change` the input when the run is open: it has been checked, and little of it has been submitted."""
    process = cli.start("infer", "batch", "--config", str(config), "--json")
    assert process.stdout is not None and process.stderr is not None
    said: list[str] = []
    for line in process.stdout:
        said.append(line)
        if '"run_opened"' in line:
            process.send_signal(signal.SIGSTOP)
            change()
            process.send_signal(signal.SIGCONT)
    err = process.stderr.read()
    assert "Traceback" not in err, err
    return Finished(process.wait(), "".join(said), err)


CHANGES = {
    "cut": "in.jsonl ends at row 19999, 20000 were checked",
    "edited": "row 20000 (in.jsonl:20000) is another than when it was checked",
    "grown": "row 20001 (in.jsonl:20001) was not there when the input was checked",
}


@pytest.mark.parametrize(
    "change",
    # That each is noticed, and what is said, tests/core/test_source.py shows.
    [pytest.param(name, marks=[] if name == "edited" else [pytest.mark.slow]) for name in CHANGES],
)
def test_an_input_that_changes_after_it_was_checked(cli: Cli, change: str) -> None:
    """More of it than is submitted ahead, so that whatever the moment, its end is read after the change."""
    lines = [json.dumps({"prompt": f"row {n}", "n": n, "pad": "x" * 2000}) + "\n" for n in range(ROWS_AHEAD)]
    path, config = cli.directory / "in.jsonl", cli.config(workers={"prefix_affinity": False})
    path.write_text("".join(lines))
    size = path.stat().st_size

    def make() -> None:
        with path.open("r+b") as file:
            if change == "edited":
                file.seek(size - len(lines[-1]) + 2)
                file.write(b"q")
            elif change == "grown":
                file.seek(size)
                file.write(lines[0].encode())
            else:
                file.truncate(size - len(lines[-1]))

    done = when_opened(cli, config, make)
    assert done.code == FAILED and CHANGES[change] in done.err and "[input_changed]" in done.err, done
    path.write_text("".join(lines))
    done = batch(cli, config)
    assert done.code == OK, done
    whole(cli, count=ROWS_AHEAD)


@pytest.mark.slow
def test_a_pattern_never_reaches_what_a_run_writes(cli: Cli) -> None:
    cli.rows(ROWS)
    config = cli.config(input={"glob": "*.jsonl"}, output={"dir": ".", "openai": True})
    assert batch(cli, config).code == OK
    whole(cli, ".")
    done = batch(cli, config)
    assert done.code == OK and ": completions.jsonl" in done.out
    whole(cli, ".")
    named = cli.config("next.toml", input={"glob": "completions.jsonl"}, output={"dir": "next"})
    assert batch(cli, named).code == OK  # results of another run are input when they are named
    whole(cli, "next")


def test_results_that_somebody_damages(cli: Cli) -> None:
    """While they are written, and after the run was complete."""
    cli.rows(400)
    config = cli.config(backend={"delay_ms": 200, "concurrency": 16})
    path = cli.directory / "out" / "completions.jsonl"
    process = cli.start("infer", "batch", "--config", str(config), "--json")
    for share, damage in enumerate((lambda: os.truncate(path, 0), path.unlink)):
        cli.wait_for_rows(50 + 100 * share, process)
        damage()
    out, err = process.communicate(timeout=90)
    assert process.returncode == OK, (out, err)
    assert "was cut from" in out and "was deleted while" in out and "written anew from the ledger" in out
    whole(cli, count=400)
    half = path.read_bytes()[: path.stat().st_size // 2]
    path.write_bytes(half)
    (cli.directory / "out" / "errors.jsonl").write_text("more\n")
    done = batch(cli, config)
    assert done.code == OK and "was cut to" in done.out, done
    whole(cli, count=400)
    assert (cli.directory / "out" / "errors.jsonl").read_bytes() == b""
    assert "run_opened" not in batch(cli, config).out  # complete, and believed


def test_an_id_and_its_text_are_one(cli: Cli) -> None:
    (cli.directory / "in.jsonl").write_text('{"prompt": "a", "id": 1}\n{"prompt": "b", "id": "1"}\n')
    done = batch(cli, cli.config())
    assert done.code == USAGE and "in.jsonl:2: " in done.err and " in.jsonl:1 " in done.err


def test_rows_that_cannot_be_used_are_left_out_and_nothing_else(cli: Cli) -> None:
    rows = text(cli).splitlines()
    spoilt = {3: b"no json", 17: b'{"prompt": 5}', 40: b'{"prompt": "a", "prompt": "b"}'}
    path = cli.directory / "in.jsonl"
    path.write_bytes(b"".join(spoilt.get(i, row) + b"\n" for i, row in enumerate(rows)))
    refused = batch(cli, cli.config())
    assert refused.code == USAGE and all(f"in.jsonl:{i + 1}: " in refused.err for i in spoilt), refused.err
    assert len(refused.event("error")["error"]["faults"]) == len(spoilt)
    assert not (cli.directory / "out").exists()

    config = cli.config(input={"glob": "in.jsonl", "on_bad_row": "skip"}, backend={"kind": "mock", "delay_ms": 300})
    process = cli.start("infer", "batch", "--config", str(config))
    cli.wait_for_rows(1, process)
    process.kill()
    process.wait()
    done = batch(cli, config)
    assert done.code == OK, done
    assert (
        done.event("summary")["rows"] | {"invalid": 3, "failed": 3, "completed": ROWS - 3, "total": ROWS}
        == (done.event("summary")["rows"])
    )
    assert [row["n"] for row in cli.completions()] == [i for i in range(ROWS) if i not in spoilt]
    errors = [json.loads(line) for line in (cli.directory / "out" / "errors.jsonl").read_text().splitlines()]
    assert [(e["row"], e["line"], e["code"]) for e in errors] == [(i + 1, i + 1, "invalid_row") for i in spoilt]
    assert errors[0]["input"] == "no json"
    assert (
        f"{ROWS - 3} completions, 0 failed, 3 left out as invalid"
        in cli.run("infer", "batch", "--config", str(config)).out
    )

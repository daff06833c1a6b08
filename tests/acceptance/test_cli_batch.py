"""`rollout infer batch` on this machine, from its command to its files, and whatever happens in between."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest
from acceptance_cli import Cli, Finished, until

ROWS = 400


def check(cli: Cli, count: int, output: str = "out") -> None:
    """Every row once, in input order."""
    assert [row["n"] for row in cli.completions(output)] == list(range(count))


def children(cli: Cli, name: str) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in psutil.process_iter(["cmdline"]):
        command = " ".join(process.info["cmdline"] or [])
        if f"{name} run" in command and str(cli.directory) in command:
            found.append(process)
    return found


def test_every_row_once_in_order(cli: Cli) -> None:
    cli.rows(ROWS)
    config = str(cli.config(workers={"count": 2}))
    done = cli.run("infer", "batch", "--config", config)
    assert done.code == 0, done
    check(cli, ROWS)
    summary = json.loads((cli.directory / "out" / "summary.json").read_text())
    assert summary["state"] == "completed"
    assert summary["rows"] == {
        "total": ROWS, "committed": ROWS, "completed": ROWS, "failed": 0, "invalid": 0, "cancelled": 0, "skipped": 0,
    }  # fmt: skip
    assert f"{ROWS} of {ROWS} rows completed" in done.out and "completions.jsonl" in done.out
    assert not cli.left_behind()

    again = cli.run("infer", "batch", "--config", config)
    assert again.code == 0 and "is complete already" in again.out
    check(cli, ROWS)


def test_json_lines(cli: Cli) -> None:
    cli.rows(50)
    done = cli.run("infer", "batch", "--config", str(cli.config()), "--json")
    assert done.code == 0 and len(done.events) == len(done.out.splitlines())
    opened, summary = done.event("run_opened"), done.event("summary")
    assert opened["rows"] == 50 and opened["resumed"] is False
    assert summary["run_id"] == opened["run_id"] == (cli.directory / "out" / "run-id").read_text().strip()
    assert (
        summary["rows"]["completed"] == 50 and Path(summary["files"]["completions.jsonl"]).name == "completions.jsonl"
    )
    again = cli.run("infer", "batch", "--config", str(cli.config()), "--json")
    assert again.code == 0 and again.event("summary")["files"] == summary["files"]
    progress = done.event("progress")
    keys = {"rows", "submitted", "done", "failed", "committed", "running", "workers"}
    assert keys | {"rows_per_s", "tokens_per_s", "eta_s"} <= progress.keys()


def test_rows_that_fail_are_reported_and_sink_nothing(cli: Cli) -> None:
    cli.rows(60)
    config = str(cli.config(backend={"fail_match": "row 7"}, run={"max_attempts": 1}))
    done = cli.run("infer", "batch", "--config", config)
    assert done.code == 0, done
    assert "warning: 1 row failed for good" in done.out
    assert [row["n"] for row in cli.completions()] == [n for n in range(60) if n != 7]
    (error,) = map(json.loads, (cli.directory / "out" / "errors.jsonl").read_text().splitlines())
    assert (error["row"], error["input"]["n"], error["attempts"]) == (8, 7, 1)


def test_when_every_row_fails_the_exit_code_says_so(cli: Cli) -> None:
    cli.rows(5)
    done = cli.run(
        "infer", "batch", "--config", str(cli.config(backend={"fail_match": "row"}, run={"max_attempts": 1}))
    )
    assert done.code == 1 and "5 rows failed for good" in done.out


def test_killed_and_run_again(cli: Cli) -> None:
    cli.rows(ROWS)
    config = str(cli.config(backend={"delay_ms": 300, "concurrency": 16}, workers={"count": 2}))
    process = cli.start("infer", "batch", "--config", config)
    cli.wait_for_rows(ROWS // 5, process)
    process.kill()
    process.wait()
    until(lambda: not cli.left_behind(), "the embedded cluster to end with its parent")
    assert 0 < len(cli.completions()) < ROWS
    done = cli.run("infer", "batch", "--config", config)
    assert done.code == 0, done
    assert "going on" in done.out
    check(cli, ROWS)
    assert not cli.left_behind()


def test_settings_that_change_no_result_are_followed(cli: Cli) -> None:
    cli.rows(ROWS)
    config = str(cli.config(backend={"delay_ms": 500, "concurrency": 5}))
    process = cli.start("infer", "batch", "--config", config)
    cli.wait_for_rows(5, process)
    process.kill()
    process.wait()
    cli.config(backend={"delay_ms": 0, "concurrency": 50, "seed": 1})
    refused = cli.run("infer", "batch", "--config", config)
    assert refused.code == 2 and "backend.seed" in refused.err and "backend.delay_ms" not in refused.err
    cli.config(backend={"delay_ms": 0, "concurrency": 50})
    done = cli.run("infer", "batch", "--config", config)
    assert done.code == 0 and "backend.delay_ms: 500.0 -> 0.0" in done.out, done
    check(cli, ROWS)


@pytest.mark.slow
def test_killed_and_at_once_run_again(cli: Cli) -> None:
    """The next command does not wait for its predecessor's children, and is not in their way."""
    cli.rows(ROWS)
    config = str(cli.config(backend={"delay_ms": 200, "concurrency": 16}))
    for share in (10, 4, 2):
        process = cli.start("infer", "batch", "--config", config)
        cli.wait_for_rows(ROWS // share, process)
        process.kill()
        process.wait()
    assert cli.run("infer", "batch", "--config", config).code == 0
    check(cli, ROWS)


def test_new_rows_and_failed_rows_run_by_themselves(cli: Cli) -> None:
    """Killed before the run is complete that they follow, and while they run."""
    cli.rows(ROWS)
    slow = {"delay_ms": 100, "concurrency": 5, "fail_match": "row 7"}
    options: dict[str, Any] = {"run": {"max_attempts": 1}, "workers": {"count": 2}}
    config = str(cli.config(backend=slow, **options))
    extend = ("infer", "batch", "--config", config, "--extend")
    process = cli.start("infer", "batch", "--config", config)
    cli.wait_for_rows(ROWS // 4, process)
    process.kill()
    process.wait()
    cli.rows(ROWS + 100)
    refused = cli.run("infer", "batch", "--config", config)
    assert refused.code == 2 and "--extend" in refused.err
    cli.config(backend=slow | {"delay_ms": 250}, **options)  # so that a kill comes in time
    process = cli.start(*extend)
    cli.wait_for_rows(ROWS, process)  # of the 489 that succeed
    process.kill()
    process.wait()
    done = cli.run(*extend, "--json")
    assert done.code == 0 and done.event("run_opened")["rows"] == 100
    assert done.event("summary")["rows"]["total"] == ROWS + 100
    found = [row["n"] for row in cli.completions()]
    assert found == [n for n in range(ROWS + 100) if n != 7 and not 70 <= n < 80]

    assert cli.run("infer", "retry", "out", "--code", "no_such").code == 2
    cli.config(backend={**slow, "fail_match": ""}, **options)
    done = cli.run("infer", "retry", "--config", config, "--json")
    assert done.code == 0 and done.event("run_opened")["rows"] == 11
    check(cli, ROWS + 100)
    assert (cli.directory / "out" / "errors.jsonl").read_text() == ""
    nothing = cli.run("infer", "retry", "out")
    assert nothing.code == 0 and "nothing to run again" in nothing.out
    (cli.directory / "out" / ".run.json").unlink()  # as where the run goes on at another machine
    assert cli.run("infer", "batch", "--config", config).code == 0
    check(cli, ROWS + 100)


def test_an_input_is_followed(cli: Cli) -> None:
    """Rows come in several files, the command is killed while it runs and while it waits, and ends when it is told
    to. One engine has all rows of a command."""
    places = [cli.directory / "rows" / name for name in ("b.jsonl", "a.jsonl")]
    places[0].parent.mkdir()

    def put(at: int, numbers: Iterable[int], end: str = "\n") -> None:
        rows = [json.dumps({"prompt": f"row {n}", "n": n}) for n in numbers]
        with places[at].open("a") as file:
            file.write("\n".join(rows) + end)

    slow = {"delay_ms": 50, "concurrency": 5}
    config = str(cli.config(backend=slow, input={"glob": "rows/*.jsonl"}))
    command = ("infer", "batch", "--config", config, "--follow", "--json")
    process = cli.start(*command)
    until(lambda: (cli.directory / "out" / ".lock").exists(), "the command to begin")
    put(0, range(100))
    cli.wait_for_rows(20, process)
    put(1, range(100, 150))
    process.kill()
    process.wait()
    process = cli.start(*command)
    cli.wait_for_rows(150, process)
    put(0, range(150, 160), end="")
    put(1, range(160, 170))
    cli.wait_for_rows(160, process)
    process.kill()
    process.wait()
    process = cli.start(*command)
    put(0, [], end="\n")
    cli.wait_for_rows(170, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, (out, err)
    done = Finished(0, out, err)
    last = [event for event in done.events if event["event"] == "summary"][-1]
    assert done.event("followed") and last["rows"]["completed"] == 170
    found = [row["n"] for row in cli.completions()]
    assert found[:150] == list(range(150)) and sorted(found[150:]) == list(range(150, 170))

    done = cli.run("infer", "batch", "--config", config)
    assert done.code == 0 and "is complete already" in done.out
    put(1, range(170, 180))
    done = cli.run(*command, "--stop-when-empty", "1")
    assert done.code == 0 and done.event("run_opened")["rows"] == 10
    assert len(cli.completions()) == 180
    engines = (cli.directory / "out" / ".rollout" / "logs" / "worker-1.jsonl").read_text().count('"engine_ready"')
    assert engines == 4  # of as many commands, and more runs


def test_ctrl_c_finishes_the_rows_of_an_input_that_is_followed(cli: Cli) -> None:
    cli.rows(60)
    config = str(cli.config(backend={"delay_ms": 200, "concurrency": 5}))
    process = cli.start("infer", "batch", "--config", config, "--follow", "--json")
    cli.wait_for_rows(5, process)
    process.send_signal(signal.SIGINT)
    cli.rows(70)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, (out, err)
    assert Finished(0, out, err).event("draining")["unfinished"] > 0
    check(cli, 60)


def test_a_larger_limit_runs_the_further_rows(cli: Cli) -> None:
    """A smaller one, and rows that are others, are refused."""
    cli.rows(60)
    command = ("infer", "batch", "--config", str(cli.config()), "--json")
    assert cli.run(*command, "--limit", "10").code == 0
    assert cli.run(*command, "--limit", "5").code == 2
    for limit, new in ((("--limit", "30"), 20), ((), 30)):
        done = cli.run(*command, *limit)
        assert done.code == 0 and done.event("run_opened")["rows"] == new
    check(cli, 60)


def test_ctrl_c_keeps_everything_and_says_how_to_go_on(cli: Cli) -> None:
    cli.rows(ROWS)
    config = str(cli.config(backend={"delay_ms": 300, "concurrency": 16}))
    process = cli.start("infer", "batch", "--config", config, "--workers", "2")
    cli.wait_for_rows(20, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, (out, err)
    assert f": rollout infer batch --config {config} --workers 2" in out
    assert f"of {ROWS} rows are in out; nothing is lost" in out and "Traceback" not in err
    assert not cli.left_behind()
    kept = len(cli.completions())
    done = cli.run("infer", "batch", "--config", config, "--json")
    assert done.code == 0 and done.event("run_opened")["resumed"] is True
    assert kept >= 20
    check(cli, ROWS)


def test_ctrl_c_twice_ends_at_once(cli: Cli) -> None:
    cli.rows(ROWS)
    config = str(cli.config(backend={"delay_ms": 2000, "concurrency": 4}))
    process = cli.start("infer", "batch", "--config", config)
    until(lambda: (cli.directory / "out" / "run-id").exists(), "the run")
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT)
    until(lambda: not cli.left_behind(), "every process to end")


@pytest.mark.slow
def test_children_that_are_killed_come_back(cli: Cli) -> None:
    cli.rows(ROWS)
    config = str(cli.config(backend={"delay_ms": 300, "concurrency": 16}, workers={"count": 2}))
    process = cli.start("infer", "batch", "--config", config)
    cli.wait_for_rows(30, process)
    children(cli, "rollout_worker")[0].kill()
    cli.wait_for_rows(90, process)
    for coordinator in children(cli, "rollout_coordinator"):
        coordinator.kill()
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, (out, err)
    assert "it is started again, its work goes on" in out
    check(cli, ROWS)


def test_replicas_share_the_rows_and_one_that_is_killed_costs_none(cli: Cli) -> None:
    cli.rows(ROWS)
    backend = {"kind": "mock", "delay_ms": 100, "concurrency": 2, "replicas": 3}
    process = cli.start("infer", "batch", "--config", str(cli.config(backend=backend)))
    cli.wait_for_rows(30, process)

    def engines() -> list[psutil.Process]:
        (worker,) = children(cli, "rollout_worker")
        return [one for one in worker.children(recursive=True) if "processes.runner" in " ".join(one.cmdline())]

    until(lambda: len(engines()) == 3, "three engines")
    engines()[0].kill()
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, out + err
    check(cli, ROWS)


def test_two_commands_do_not_share_a_directory(cli: Cli) -> None:
    cli.rows(ROWS)
    config = str(cli.config(backend={"delay_ms": 500, "concurrency": 4}))
    process = cli.start("infer", "batch", "--config", config)
    cli.wait_for_rows(1, process)
    done = cli.run("infer", "batch", "--config", config)
    assert (
        done.code == 2
        and f"is being written by another command (pid {process.pid} on {socket.gethostname()}: rollout infer"
        in done.err
    )
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 130


def test_what_changed_is_named_before_anything_starts(cli: Cli) -> None:
    cli.rows(20)
    config = str(cli.config(sampling={"max_tokens": 8}))
    assert cli.run("infer", "batch", "--config", config).code == 0
    before = cli.completions()

    def changed(**sections: dict[str, Any]) -> str:
        done = cli.run("infer", "batch", "--config", str(cli.config(**sections)))
        assert (done.code, done.out) == (2, "using the private cluster in out/.rollout\n")
        assert "changed since it was started:" in done.err
        return done.err

    assert "sampling.max_tokens: 8 -> 9" in changed(sampling={"max_tokens": 9})
    assert "model.uri: 'mock' -> 'other'" in changed(sampling={"max_tokens": 8}, model={"uri": "other"})
    text = (cli.directory / "in.jsonl").read_text()
    (cli.directory / "in.jsonl").write_text(text.replace("row 13", "row thirteen"))
    assert "(in.jsonl:14)" in changed(sampling={"max_tokens": 8})
    (cli.directory / "in.jsonl").write_text(text)
    # What does not change a result may change; what changes only how it is made is kept, and said.
    done = cli.run("infer", "batch", "--config", str(cli.config(sampling={"max_tokens": 8}, workers={"count": 3})))
    assert done.code == 0
    assert cli.completions() == before


def test_the_embedded_cluster_ignores_settings_of_another(cli: Cli) -> None:
    cli.rows(5)
    cli.env |= {"ROLLOUT_TRANSPORT__LISTEN_ADDR": "192.0.2.1:1", "ROLLOUT_STORAGE__BACKEND": "postgres"}
    cli.env |= {"ROLLOUT_TRANSPORT__TLS_DIR": "/nowhere"}
    assert cli.run("infer", "batch", "--config", str(cli.config())).code == 0
    check(cli, 5)


def test_a_child_that_cannot_start_is_explained(cli: Cli) -> None:
    cli.rows(5)
    (cli.directory / "out" / ".rollout").mkdir(parents=True)
    (cli.directory / "out" / ".rollout" / "rollout.db").write_text("this is no database" * 100)
    done = cli.run("infer", "batch", "--config", str(cli.config()))
    assert done.code in (1, 2)
    assert "coordinator of the embedded cluster ended" in done.err and "its log:" in done.err


def test_no_key_is_readable_by_others(cli: Cli) -> None:
    cli.rows(3)
    assert cli.run("infer", "batch", "--config", str(cli.config())).code == 0
    keys = list((cli.directory / "out" / ".rollout" / "tls").glob("*.key.pem"))
    assert keys and all(key.stat().st_mode & 0o077 == 0 for key in keys)

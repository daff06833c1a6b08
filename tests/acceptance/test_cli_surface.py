"""What a person meets at the edge of the programs: streams, locales, the environment, names, the log of a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from acceptance_cli import ROLLOUT, Cli, until
from cluster import binary, free_port

# ---- standard output


@pytest.mark.parametrize(
    ("redirection", "words"),
    [(">&-", "Bad file descriptor"), (">/dev/full", "No space left on device"), ("| true", "Broken pipe")],
)
@pytest.mark.parametrize("command", ["plan --config batch.toml --json", "run -h"])
def test_output_that_cannot_be_written_is_one_sentence(cli: Cli, command: str, redirection: str, words: str) -> None:
    if redirection == ">/dev/full" and not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    cli.rows(3)
    cli.config()
    script = f"sleep 0.3; {ROLLOUT} {command} {redirection}; exit ${{PIPESTATUS[0]}}"
    if redirection.startswith("|"):
        script = f"(sleep 1; {ROLLOUT} {command}; echo $? >code) {redirection}; sleep 0.1; exit $(cat code)"
    done = subprocess.run(["bash", "-c", script], cwd=cli.directory, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    said = f"error [output_unwritable]: standard output cannot be written: {words}\n"
    assert done.stderr == ("" if words == "Broken pipe" else said)  # who reads no more needs no reason


def test_a_workload_whose_output_is_closed_finishes(cli: Cli) -> None:
    cli.rows(20)
    config = cli.config()
    for n, redirection in enumerate((">&-", ">/dev/full")):
        if redirection == ">/dev/full" and not Path("/dev/full").exists():
            continue
        script = f"{ROLLOUT} infer batch --config {config} --json {redirection}"
        done = subprocess.run(["bash", "-c", script], cwd=cli.directory, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done
        assert "standard output cannot be written" in done.stderr and "results are in out" in done.stderr
        assert len(cli.completions()) == 20, n
        assert json.loads((cli.directory / "out/summary.json").read_text())["state"] == "completed"


def test_an_ascii_locale_and_names_that_are_no_text(cli: Cli) -> None:
    cli.rows(2)
    cli.config(output={"dir": "oué"})
    cli.env |= {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    done = cli.run("infer", "batch", "--config", "batch.toml")
    assert done.code == 0 and "ou\\xe9/completions.jsonl" in done.out, done
    assert len(cli.completions("oué")) == 2
    done = cli.run("plan", "--config", os.fsdecode(b"no\xff\xc3\xa9.toml"), "--json")
    assert done.code == 2 and r"no\xff\xe9.toml: " in done.err, done
    assert json.loads(done.out)["error"]["message"].startswith("no\udcffé.toml")


def test_a_locale_that_cannot_name_the_file(cli: Cli) -> None:
    cli.rows(2)
    cli.config(output={"dir": "oué"})
    cli.env |= {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = cli.run("infer", "batch", "--config", "batch.toml")
    if done.code == 0:
        pytest.skip("this system names files in UTF-8 whatever the locale")
    assert done.code == 2 and "'ou\\xe9'" in done.err and "LC_ALL=C.UTF-8" in done.err, done


# ---- the environment, files, usage


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        (
            "ROLLOUT_NOSUCH__X",
            "there is no such key; variables are ROLLOUT_<SECTION>__<KEY>, with a section of ALGORITHM, BACKEND",
        ),
        ("ROLLOUT_SAMPLNG__MAX_TOKENS", "there is no such key; did you mean ROLLOUT_SAMPLING__MAX_TOKENS?"),
        ("ROLLOUT_WORKER_SLOTS", "there is no such variable; did you mean ROLLOUT_WORKER__SLOTS?"),
    ],
)
def test_an_unknown_variable_is_refused(cli: Cli, name: str, hint: str) -> None:
    cli.rows(1)
    cli.env[name] = "1"
    done = cli.run("infer", "batch", "--config", str(cli.config()))
    assert done.code == 2 and f"{name}: {hint}" in done.err, done
    assert not (cli.directory / "out").exists()


def test_variables_of_other_programs_are_let_be(cli: Cli) -> None:
    cli.rows(1)
    cli.env |= {
        "ROLLOUT_WORKER__SLOTS": "2",
        "ROLLOUT_COORDINATOR_PORT": "tcp://10.0.0.1:1",
        "ROLLOUT_SECRET_A__B": "x",
    }
    assert cli.run("plan", "--config", str(cli.config())).code == 0


def test_a_state_that_is_none_names_those_that_are(cli: Cli) -> None:
    done = cli.run("run", "list", "--state", "runing")
    assert done.code == 2 and 'error [usage]: --state: must be "running", "paused",' in done.err
    assert 'not "runing"; did you mean "running"?' in done.err


def test_plan_knows_every_file_by_what_it_says(cli: Cli) -> None:
    files = {
        "rollout.toml": ('[transport]\ncoordinator_addrs = ["h:1"]\ntls_dir = "t"\n', "client", "they speak to h:1"),
        "mine.toml": ('[transport]\ncoordinator_addrs = ["h:1"]\n', "client", "they speak to h:1"),
        "worker.toml": ('[transport]\ncoordinator_addrs = ["h:1"]\n', "worker", "works for h:1"),
        "c.toml": ('[transport]\nlisten_addr = "h:1"\n', "coordinator", "serves h:1"),
        "w.toml": ('[transport]\ncoordinator_addrs = ["h:1"]\n[worker]\nslots = 2\n', "worker", "offers 2 slots"),
    }
    for name, (text, kind, said) in files.items():
        (cli.directory / name).write_text(text)
        done = cli.run("plan", "--config", name)
        assert f"{name}: a valid {kind} configuration" in done.out and said in done.out, done
        (cli.directory / name).unlink()


# ---- a cluster in terminals


@dataclass
class Daemon:
    """A program in a terminal of its own, and what it printed there."""

    directory: Path
    args: list[str]
    text: str = ""
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self._master, slave = pty.openpty()
        environment = os.environ | {"NO_COLOR": "1"}
        self.process = subprocess.Popen(
            self.args,
            cwd=self.directory,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
        )
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):
            while data := os.read(self._master, 4096):
                self.text += data.decode().replace("\r\n", "\n")

    def wait_for(self, text: str) -> None:
        until(lambda: text in self.text or self.process.poll() is not None, f"{text!r} in {self.text}")
        assert text in self.text, self.text

    def end(self, number: int = signal.SIGTERM) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.process.wait(60)
        self._reader.join(10)
        os.close(self._master)


@pytest.fixture
def daemons(cli: Cli) -> Iterator[list[Daemon]]:
    """A coordinator and a worker, configured by the files that they find in their directory."""
    port = free_port()
    (cli.directory / "coordinator.toml").write_text(
        f'[transport]\nlisten_addr = "127.0.0.1:{port}"\ntls_dir = "keys"\n'
    )
    (cli.directory / "worker.toml").write_text(f'[transport]\ncoordinator_addrs = ["127.0.0.1:{port}"]\n')
    cli.env |= {"ROLLOUT_COORDINATOR": f"127.0.0.1:{port}", "ROLLOUT_TLS_DIR": "keys"}
    found = [Daemon(cli.directory, [binary("rollout-coordinator"), "run"])]
    found[0].wait_for("leads the cluster")
    found.append(Daemon(cli.directory, [binary("rollout-worker"), "run", "--tls-dir", "keys"]))
    yield found
    for daemon in reversed(found):
        with suppress(OSError):
            daemon.end()


LINE = re.compile(r"\d\d:\d\d:\d\d  \S.*|[A-Z][a-z]+day \d{4}-\d\d-\d\d, times are \S+")


def test_the_log_of_a_terminal(cli: Cli, daemons: list[Daemon]) -> None:
    coordinator, worker = daemons
    coordinator.wait_for("is ready")
    coordinator.end(signal.SIGKILL)
    worker.wait_for("does not answer")
    worker.wait_for("nothing new is started")
    again = Daemon(cli.directory, coordinator.args)
    daemons.append(again)
    worker.wait_for("answers again, after")
    assert f"starts, with the configuration {cli.directory / 'worker.toml'}" in worker.text
    assert "warning: the coordinator that led before, at 127.0.0.1:" in again.text
    assert "ended without being stopped (killed, crashed or cut off); it was last seen at 2" in again.text
    worker.end()
    again.wait_for("left: told to stop by SIGTERM")
    again.end()
    assert "stops: told to stop by SIGTERM" in again.text and "has stopped" in again.text
    for daemon in (coordinator, worker, again):
        lines = daemon.text.splitlines()
        assert all(LINE.fullmatch(line) for line in lines), daemon.text
        assert "=" not in daemon.text and not re.search(r"[0-9A-Z]{26}", daemon.text), daemon.text
    assert worker.text.count("does not answer") == 1, worker.text


def test_runs_and_workers_by_short_id_name_and_last(cli: Cli, daemons: list[Daemon]) -> None:
    cli.rows(4)
    ids: list[str] = []
    for output, name in (("one", ()), ("two", ("--name", "nightly")), ("three", ("--name", "nightly"))):
        config = cli.config(f"{output}.toml", output={"dir": output})
        assert cli.run("infer", "batch", "--config", str(config), *name).code == 0
        ids.append((cli.directory / output / "run-id").read_text().strip())

    def shown(text: str) -> str:
        done = cli.run("run", "show", text, "--json")
        return json.loads(done.out)["run_id"] if done.code == 0 else done.err

    assert [shown(text) for text in (ids[0], ids[1][-8:].lower(), "one", "@last")] == [*ids[:2], ids[0], ids[2]]
    newest = cli.run("run", "show", "nightly", "--json")
    assert json.loads(newest.out)["run_id"] == ids[2] and "'nightly'" in newest.err
    ambiguous = shown(ids[0][:5])
    assert "3 runs" in ambiguous and all(run_id in ambiguous for run_id in ids)
    assert "'nobody'" in shown("nobody")
    (cli.directory / ".state/rollout/runs").unlink()
    last = cli.run("run", "show", "@last", "--json")
    assert json.loads(last.out)["run_id"] == ids[2] and "is its newest" in last.err

    cli.env |= {"_ROLLOUT_COMPLETE": "complete_bash", "COMP_WORDS": "rollout run show nigh", "COMP_CWORD": "3"}
    assert cli.run().out.split() == ["nightly"]
    cli.env["COMP_WORDS"] = f"rollout run pause {ids[0][-8:-4]}"
    assert cli.run().out.split() == [ids[0][-8:]]
    cli.env["ROLLOUT_COORDINATOR"] = "127.0.0.1:1"
    done = cli.run()
    assert (done.out.split(), done.err) == ([], ""), "nobody answers"


def test_a_worker_by_the_beginning_of_what_is_shown_of_it(cli: Cli, daemons: list[Daemon]) -> None:
    daemons[0].wait_for("is ready")
    (worker,) = json.loads(cli.run("workers", "--json").out)["workers"]
    short = worker["worker_id"][-8:]
    assert short in daemons[0].text
    drained = cli.run("workers", "drain", short[:4].lower())
    assert drained.code == 0, drained
    assert daemons[1].process.wait(60) == 0


def test_a_directory_whose_name_is_too_long_for_the_database(cli: Cli) -> None:
    deep = cli.directory.joinpath(*["d" * 90] * 9)
    deep.mkdir(parents=True)
    cli.directory = deep
    cli.rows(1)
    done = cli.run("infer", "batch", "--config", str(cli.config()))
    assert done.code == 1 and "SQLite takes 504" in done.err, done

"""The pure parts of trials: what is hidden, what is kept of output, what is asked for, and what a trial comes to."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from job_files import make_task
from rollout.cloud.shielded import to_the_end
from rollout.workloads.job.artifacts import Artifact
from rollout.workloads.job.config import JobConfig
from rollout.workloads.job.load_task import load_task
from rollout.workloads.job.network import NetworkPolicy
from rollout.workloads.job.rewards import Rewards
from rollout_worker.sandboxes.errors import (
    SandboxEndedError,
    SandboxError,
    SandboxFileError,
    SandboxGoneError,
    SandboxProviderError,
)
from rollout_worker.sandboxes.images.prepare import Prepared
from rollout_worker.sandboxes.port import Host, Limits, Network, RootFs
from rollout_worker.sandboxes.reach import DroppedError, Reach, Shell
from rollout_worker.trials.environment import workdir_of
from rollout_worker.trials.faults import BY_AGENT, faults
from rollout_worker.trials.gathering import declared, read_manifest, without_links
from rollout_worker.trials.lanes import FIRST_S, Lanes
from rollout_worker.trials.masking import Masks, secrets_of
from rollout_worker.trials.outcome import Outcome, StepOutcome, count
from rollout_worker.trials.port import TrialFault
from rollout_worker.trials.streams import BURST_LINES, BoundedFile, Live, Streams
from rollout_worker.trials.times import Times
from rollout_worker.trials.told import environs
from rollout_worker.trials.waits import Waits
from rollout_worker.trials.wanted import limits_of, network_of

# What is waited for


async def test_a_deadline_stands_still_and_a_phase_begins_later_while_others_are_waited_for() -> None:
    times, told = Times(), list[str]()
    waits = Waits(times, told.append, "set-up")
    with times.phase("environment_setup"):
        async with asyncio.timeout(0.2) as waits.deadline:
            with waits("waiting for room"):
                await asyncio.sleep(0.4)
    durations, moments = times.result()
    assert told == ["waiting for room", "set-up"]
    assert durations.environment_setup_sec is not None and durations.environment_setup_sec < 0.3
    assert moments.environment_setup_started_at is not None
    assert (moments.environment_setup_started_at - moments.started_at).total_seconds() >= 0.4


# What is hidden


def masked(masks: Masks, *pieces: bytes) -> bytes:
    stream = masks.stream()
    return b"".join([*(stream.feed(piece) for piece in pieces), stream.close()])


@pytest.mark.parametrize("seed", range(20))
def test_values_are_hidden_however_they_are_cut(seed: int) -> None:
    chance = random.Random(seed)
    masks = Masks(["abcabc1", "abcabc12345", "ababab", "bcabca"])
    data = bytes(chance.choice(b"abc12345") for _ in range(400)) + b"abcabc12345"
    cuts = sorted(chance.sample(range(len(data)), 60))
    pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    assert masked(masks, *pieces) == masked(masks, data)
    assert not [value for value in masks.values if value in masked(masks, data)]


def test_names_are_hidden_too_and_stay_different(tmp_path: Path) -> None:
    for name in ("a-secret-one.log", "a-secret-two.log", "in-secret-one/secret-two", "plain"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    Masks(["secret-one", "secret-two"]).names(tmp_path)
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert found == ["a-***.log", "a-***.log.2", "in-***", "in-***/***", "plain"]


def test_what_only_begins_like_a_secret_is_shown(tmp_path: Path) -> None:
    masks = Masks(["secret-one"])
    assert masked(masks, b"secret", b"-o", b"ther secret-on", b"e") == b"secret-other ***"
    assert masked(masks, b"secret-on") == b"secret-on"
    assert masks.text("with secret-one") == "with ***"
    (tmp_path / "log").write_bytes(b"x" * 3_000_000 + b"secret-one")
    masks.file(tmp_path / "log")
    assert (tmp_path / "log").read_bytes()[-6:] == b"xxx***"
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_short_values_are_shown_and_later_ones_hidden_too() -> None:
    masks = Masks(["short"])
    stream = masks.stream()
    assert stream.feed(b"short") == b"short"
    masks.hide(["longer-value\n"])
    assert stream.feed(b"longer-value") == b""
    assert stream.close() == b"***"
    assert secrets_of({"OPENAI_API_KEY": "a", "PATH": "b", "db_password": "c"}) == ["a", "c"]


# What is kept and shown of output


def written(path: Path, *pieces: bytes) -> bytes:
    file = BoundedFile(path, head=10, tail=5)
    for piece in pieces:
        file.write(piece)
    file.close()
    return path.read_bytes()


def test_a_file_keeps_beginning_and_end(tmp_path: Path) -> None:
    assert written(tmp_path / "short", b"12345", b"6789") == b"123456789"
    assert written(tmp_path / "full", b"0123456789", b"abcde") == b"0123456789abcde"
    data = b"0123456789" + b"x" * 100 + b"abcde"
    cut = b"0123456789\n[... 100 bytes left out ...]\nabcde"
    assert written(tmp_path / "long", data) == cut
    assert written(tmp_path / "pieces", *(data[n : n + 1] for n in range(len(data)))) == cut


def test_a_full_disk_is_remarked_and_no_fault_of_what_prints(tmp_path: Path) -> None:
    (tmp_path / "stdout.txt").symlink_to("/dev/full")
    streams = Streams(tmp_path, "agent", Live("t", lambda line: None), Masks())
    streams.feed("stdout", b"hello\n")
    assert streams.close() == ["stdout was not kept whole: No space left on device"]


class Shown:
    def __init__(self, directory: Path) -> None:
        self.lines: list[str] = []
        self.now = 0.0
        self._streams = Streams(directory, "agent", Live("d/t/a/1", self.lines.append, 8, lambda: self.now), Masks())

    def feed(self, *pieces: bytes) -> list[str]:
        for piece in pieces:
            self._streams.feed("stdout", piece)
        shown = [line.partition("] ")[2] for line in self.lines]
        self.lines.clear()
        return shown

    def close(self) -> list[str]:
        self._streams.close()
        return self.feed()


def test_lines_are_whole_and_hold_no_control_characters(tmp_path: Path) -> None:
    shown = Shown(tmp_path)
    assert shown.feed(b"on", b"e\ntw") == ["one"]
    assert shown.feed(b"o\n\n  \n10%\r20%\r\nlast") == ["two", "20%"]
    assert shown.feed(b" \x1b[1mbold\x1b[0m \x1e1.2.3 \xff\n") == ["last bold 1.2.3 �"]
    assert shown.feed(b"x" * 10_000 + b"\n") == ["x" * 2000 + " (cut)"]
    assert shown.feed(b"no end") == []
    assert shown.close() == ["no end"]


def test_a_flood_is_counted_and_goes_on_once_there_is_room(tmp_path: Path) -> None:
    shown = Shown(tmp_path)
    assert len(shown.feed(b"y\n" * 500 + b"half")) == BURST_LINES / 8
    assert shown.feed(b" a line\nnext\n") == []
    shown.now += 2.0
    assert shown.feed(b"again\n") == ["... 402 lines are not shown", "again"]
    shown.close()


def test_what_is_shown_says_whose_it_is(tmp_path: Path) -> None:
    lines: list[str] = []
    streams = Streams(tmp_path, "verifier", Live("d/t/a/1", lines.append), Masks())
    streams.feed("stderr", b"hello\n")
    assert lines == ["[d/t/a/1 verifier] hello"]
    streams.close()


# Pauses


def test_a_lane_pauses_as_long_as_it_was_told_or_ever_longer() -> None:
    now = 100.0
    lanes = Lanes(lambda: now)
    assert (lanes.refused("a", 7), lanes.left("a"), lanes.left("b")) == (7, 7, 0)
    assert lanes.refused("a", 1) == 1
    assert lanes.left("a") == 7
    now += 8
    assert lanes.left("a") == 0
    assert [lanes.refused("a", None) for _ in range(3)] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S]
    lanes.passed("a")
    assert lanes.refused("a", None) == FIRST_S


# What is asked for


def config(**keys: Any) -> JobConfig:
    return JobConfig.model_validate({"agents": [{"name": "nop"}], "datasets": [{"path": "d"}], **keys})


def test_limits_are_the_jobs_or_the_tasks_or_the_providers(tmp_path: Path) -> None:
    environment = load_task(make_task(tmp_path, "[environment]\ncpus = 2.5\nmemory_mb = 300\n")).task.environment
    usual = Limits()
    assert limits_of(environment, config().environment) == Limits(2.5, 300, usual.storage_mb)
    job = config(environment={"override_memory": "1G", "override_storage_mb": 7, "cpu_enforcement_policy": "ignore"})
    assert limits_of(environment, job.environment) == Limits(usual.cpus, 1024, 7)


@pytest.mark.parametrize(
    ("mode", "hosts", "extra", "network"),
    [
        ("public", (), ("x.org", "10.1.2.3"), Network("public", ("10.1.2.3",))),
        ("no-network", (), (), Network("none")),
        ("no-network", (), ("x.org",), Network("allowlist", ("x.org",))),
        ("allowlist", ("a.org",), ("x.org", "a.org"), Network("allowlist", ("a.org", "x.org"))),
    ],
)
def test_the_network_of_a_sandbox(mode: Any, hosts: tuple[str, ...], extra: tuple[str, ...], network: Network) -> None:
    policy = NetworkPolicy(mode=mode, allowed_hosts=hosts)
    assert network_of([policy, policy], extra) == network
    shared = network_of([policy, policy], extra, shares_host=True)
    assert shared == (Network("host") if mode == "public" else network)


def test_one_sandbox_has_one_network() -> None:
    with pytest.raises(TrialFault, match=r"no-network, public.*environment_mode"):
        network_of([NetworkPolicy(), NetworkPolicy(mode="no-network")], ())


@pytest.mark.parametrize(
    ("root", "image_says", "is_host", "workdir"),
    [
        (Host(), None, True, "/app"),
        (Host(), "/", True, "/app"),
        (Host(), "/", False, "/"),
        (Host(), "/srv", True, "/srv"),
        (RootFs(Path("/x")), None, False, "/app"),
    ],
)
def test_where_commands_run(
    tmp_path: Path, root: Host | RootFs, image_says: str | None, is_host: bool, workdir: str
) -> None:
    environment = load_task(make_task(tmp_path)).task.environment
    prepared = Prepared(root, "key", image_says)
    assert workdir_of(environment, prepared, is_host=is_host) == workdir


def test_variables_are_filled_in_and_every_one_that_lacks_is_told(tmp_path: Path) -> None:
    toml = '[verifier.env]\nJUDGE = "${JUDGE_KEY}"\n[environment.env]\nMODE = "${MODE:-fast}"\n'
    task = load_task(make_task(tmp_path, toml)).task
    job = config(agents=[{"name": "a", "execute": "x", "env": {"KEY": "k-${USER_KEY}", "API_TOKEN": "literal-token"}}])
    found = environs(job, job.agents[0], task, {"JUDGE_KEY": "judge", "USER_KEY": "user"})
    assert (found.sandbox, found.agent["KEY"], found.verifiers) == ({"MODE": "fast"}, "k-user", [{"JUDGE": "judge"}])
    assert found.hidden == {"judge", "user", "k-user", "literal-token"}
    with pytest.raises(ValueError, match=r"KEY needs USER_KEY.*JUDGE needs JUDGE_KEY"):
        environs(job, job.agents[0], task, {})


# Artifacts


def test_sources_of_artifacts_are_absolute_and_the_usual_place_is_one() -> None:
    artifacts = [Artifact(source="out/a"), Artifact(source="/x//y/")]
    assert [one.source for one in declared(artifacts, "/app")] == ["/logs/artifacts", "/app/out/a", "/x/y"]


def test_a_manifest_that_an_agent_may_have_made_leads_nowhere_else(tmp_path: Path) -> None:
    rows = '{"source": "/a", "status": "ok", "type": "file", "destination": '
    (tmp_path / "manifest.json").write_text(f'[{rows}"../../x"}}, {rows}"/etc"}}, {rows}"a"}}]')
    assert [one.destination for one in read_manifest(tmp_path)] == ["a"]
    (tmp_path / "manifest.json").write_text("[7]")
    with pytest.raises(TrialFault, match="cannot be read"):
        read_manifest(tmp_path)


def test_links_are_not_kept(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_text("x")
    (tmp_path / "a" / "up").symlink_to("..")
    (tmp_path / "loop").symlink_to("loop")
    assert sorted(without_links(tmp_path)) == ["a/up", "loop"]
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == ["a", "a/file"]


# Whose fault it is


@pytest.mark.parametrize(
    ("error", "after_agent", "before"),
    [
        (SandboxFileError("in the way"), BY_AGENT, "verifier_tests_copy_failed"),
        (SandboxError("processes do not end"), BY_AGENT, "verifier_tests_copy_failed"),
        (SandboxEndedError("out of memory"), BY_AGENT, "environment_lost"),
        (SandboxGoneError("evicted"), "environment_lost", "environment_lost"),
        (SandboxProviderError("500"), "verifier_tests_copy_failed", "verifier_tests_copy_failed"),
    ],
)
def test_what_an_agent_can_cause_is_its_own_once_it_has_worked(
    error: SandboxError, after_agent: str, before: str
) -> None:
    found = list[str]()
    for by_agent in (True, False):
        with (
            pytest.raises(TrialFault) as raised,
            faults("verifier_tests_copy_failed", "tests were copied", by_agent=by_agent),
        ):
            raise error
        found.append(raised.value.type)
    assert found == [after_agent, before]


async def test_a_sandbox_that_is_reached_and_runs_nothing_has_ended_by_itself() -> None:
    for inside, kind in ((True, SandboxEndedError), (False, SandboxGoneError)):
        shell = Shell("box", _Dead(inside))
        for _ in range(2):
            with pytest.raises(SandboxGoneError) as raised:
                await shell.run("true", patience_s=0)
            assert type(raised.value) is kind


class _Dead(Reach):
    def __init__(self, inside: bool) -> None:
        self._inside = inside

    async def call(self, script: str, data: bytes) -> bytes:
        raise DroppedError("exec: sh: not found", inside=self._inside)


# What a trial comes to


def step(rewards: Rewards | None, error: str = "") -> StepOutcome:
    return StepOutcome("", rewards, TrialFault(error, "why") if error else None)


@pytest.mark.parametrize(
    ("steps", "error", "rewards", "type", "valid"),
    [
        ([step({"reward": 0.5})], "", {"reward": 0.5}, None, True),
        ([step({"reward": 0.5}, "agent_execution_timeout")], "", {"reward": 0.5}, "agent_execution_timeout", True),
        ([step(None, "agent_execution_failed")], "", {"reward": 0.0}, "agent_execution_failed", True),
        ([step({"reward": 1.0}, "api_overloaded")], "", {"reward": 1.0}, "api_overloaded", False),
        ([step(None, "verifier_timeout")], "", {"reward": 0.0}, "verifier_timeout", True),
        ([step({"reward": 1.0}), step(None, "verifier_timeout")], "", {"reward": 0.5}, None, True),
        (
            [step({"a": 1.0, "b": 0.5}), step(None, "agent_execution_failed")],
            "agent_execution_failed",
            {"a": 0.5, "b": 0.25},
            "agent_execution_failed",
            True,
        ),
        ([step({"reward": 1.0}), step(None)], "environment_lost", {"reward": 1.0}, "environment_lost", False),
        ([step({"reward": 1.0})], "environment_teardown_failed", {"reward": 1.0}, "environment_teardown_failed", True),
        ([step(None, "verifier_failed")], "environment_teardown_failed", {"reward": 0.0}, "verifier_failed", True),
        ([], "environment_build_failed", None, "environment_build_failed", False),
        ([], "of_a_later_version", None, "of_a_later_version", False),
    ],
)
def test_whether_a_trial_counts(
    steps: list[StepOutcome], error: str, rewards: Rewards | None, type: str | None, valid: bool
) -> None:
    outcome = Outcome(steps=steps, error=TrialFault(error, "why") if error else None)
    told = SimpleNamespace(job=config(), task=SimpleNamespace(reward_strategy="mean", steps=steps), regrade=None)
    counted = count(cast("Any", told), outcome)
    found = None if counted.error is None else counted.error.type
    assert (counted.rewards, found, counted.is_valid) == (rewards, type, valid)


def test_steps_that_an_agent_kept_from_being_begun_are_zero() -> None:
    cut = Outcome(steps=[step({"reward": 0.9}), step(None, "agent_execution_timeout")], is_cut=True)
    told = SimpleNamespace(job=config(), task=SimpleNamespace(reward_strategy="mean", steps=[1, 2, 3]), regrade=None)
    assert count(cast("Any", told), cut).rewards == {"reward": pytest.approx(0.3)}
    cut.is_cut = False  # a step that misses its minimum ends a trial, too
    assert count(cast("Any", told), cut).rewards == {"reward": pytest.approx(0.45)}


# Cleaning up


async def test_what_cleans_up_ends_although_its_task_is_cancelled_again() -> None:
    may_end, done = asyncio.Event(), list[str]()

    async def clean_up() -> None:
        await may_end.wait()
        done.append("clean")

    task = asyncio.ensure_future(to_the_end(clean_up()))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == ["clean"]

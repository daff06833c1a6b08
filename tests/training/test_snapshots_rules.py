"""Which snapshots stay, what may change between a run and its fork, what is executed again, and what counts as equal."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from rollout.cli.anywhere import Places
from rollout.cli.progress import Display
from rollout.model.errors import ConfigError, NotFoundError
from rollout.model.item import Failure, Outcome
from rollout.wire.v1 import runs_pb2 as pb
from rollout.workloads.commit import CommitEntry
from rollout.workloads.local_model import refuse_unless_whole_model
from rollout.workloads.port import FoundSnapshot, Totals
from rollout.workloads.train.commands.snapshots import TrainingRun
from rollout.workloads.train.commands.verify import Committed, Verdict, differences, stretches
from rollout.workloads.train.commands.verifying import Verifying
from rollout.workloads.train.config import SnapshotsSection
from rollout.workloads.train.lines import TrainWriter
from rollout.workloads.train.plan import segments_of
from rollout.workloads.train.retention import outdated, retention
from rollout.workloads.train.segment import Result, Segment
from rollout.workloads.train.start import begin_with

DAY_MS = 86_400_000

# ---- retention


@pytest.mark.parametrize(
    ("rules", "gone"),
    [
        ({"keep_last": 2}, [0, 2]),
        ({"keep_last": 2, "keep_labeled": False}, [0, 1, 2]),
        ({"keep_last": 0}, []),
        ({"keep_last": 0, "max_age_s": 2 * 86400}, [0, 2]),
        ({"keep_last": 4, "max_age_s": 3 * 86400}, [0]),
        ({"keep_last": 1, "max_age_s": 1}, [0, 2, 3]),
    ],
)
def test_what_prune_lets_go(rules: dict[str, Any], gone: list[int]) -> None:
    """Made 5, 4, 3, 2 and 1 days ago; the second has a label. The newest stays, whatever is said."""
    made = [(0, ""), (1, "best"), (2, ""), (3, ""), (4, "")]
    snapshots = [(day * DAY_MS, label) for day, label in made]
    assert outdated(snapshots, 5 * DAY_MS, **{"keep_labeled": True, "max_age_s": None} | rules) == gone


@pytest.mark.parametrize(
    ("section", "options"),
    [
        ({}, {"last": "3", "from": "1"}),
        ({"keep_last": 0}, None),
        ({"keep_last": 0, "max_age": "12h"}, {"max_age_s": "43200", "from": "1"}),
        ({"keep_last": 5, "max_age": "2w"}, {"last": "5", "max_age_s": "1209600", "from": "1"}),
    ],
)
def test_retention_is_the_coordinators_from_the_first_segment_on(section: dict[str, Any], options: Any) -> None:
    policies = retention(SnapshotsSection(**section).model_dump(mode="json"))
    assert [dict(policy.options) for policy in policies] == ([] if options is None else [options])


@pytest.mark.parametrize("age", ["", "3", "0d", "1 d", "-1d", "1y"])
def test_an_age_is_a_number_and_a_unit(age: str) -> None:
    with pytest.raises(ValueError, match="max_age"):
        SnapshotsSection(max_age=age)


# ---- fork


def config(**settings: Any) -> dict[str, Any]:
    base = {"optimizer": {"kind": "adamw", "lr": 1e-3}, "lora": None, "devices": 1}
    return {
        "algorithm": {"kind": "sft", "settings": base | settings},
        "model": {"uri": "tiny", "content_id": "m", "snapshot": ""},
        "steps": 8,
        "snapshots": {"every_steps": 2},
        "start": {"uri": "run:a", "step": 4, "snapshot": "", "content_id": "", "before": {"step": 4}},
    }


LEFT = {"step": 4, "stopping": {"best": 1.0, "since": 0}, "fingerprint": {"device": "A", "threads": 1}}
FOUND = FoundSnapshot("ab" * 32, "0" * 26, config(), asdict(Result(**LEFT)))


def test_a_fork_counts_on_and_its_first_segment_says_what_it_begins_with() -> None:
    new = config(optimizer={"kind": "adamw", "lr": 5.0}, seed=9, budget={"max_steps": 7}) | {"steps": 7}
    begin_with(new, FOUND)
    prepare, first, second = segments_of(new)
    assert prepare.op == "prepare"
    assert (first.first, first.steps, second.first, second.steps) == (4, 2, 6, 1)
    assert first.before == LEFT | {"snapshot": FOUND.id}
    assert second.before == {}


def test_a_fork_on_other_hardware_says_so_from_its_first_step_on() -> None:
    new = config()
    begin_with(new, FOUND)
    writer = TrainWriter(new)
    made = Result(step=6, fingerprint={"device": "B", "threads": 1})
    first = CommitEntry(1, 1, 1, Outcome.DONE, made.encode(), Segment("segment", 4, 2).encode(), b"")
    assert list(writer.lines(first)) == []
    assert writer.summary({}, Totals())["fingerprint_changes"] == [{"after_step": 4, "changed": {"device": ["A", "B"]}}]


def test_what_a_fork_goes_on_from_is_the_snapshot_with_its_own_data() -> None:
    own = Result(data={"dataset": {"object": "d"}, "pad": 0})
    segment = Segment("segment", 4, 2, {"step": 4, "snapshot": "s"})
    assert segment.begins_with(own) == Result(step=4, snapshot="s", data=own.data)
    assert segment.begins_with(None) is None
    assert Segment("segment", 4, 2).begins_with(own) is own


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"optimizer": {"kind": "sgd"}}, "optimizer.kind: it was adamw and is sgd now"),
        ({"lora": {"r": 4, "target_modules": "all-linear"}}, "lora.r: it was not there and is 4 now"),
        ({"devices": 2}, "devices: it was 1 and is 2 now"),
        ({"model": {"uri": "other", "content_id": "n"}}, "base model is tiny, and this is another, other"),
        ({"steps": 4}, "step 4 is done, and this run has 4 steps"),
        ({"algorithm": {"kind": "dpo", "settings": {}}}, "it is sft, and this is dpo"),
    ],
)
def test_what_must_not_change_in_a_fork(change: dict[str, Any], words: str) -> None:
    settings = {key: value for key, value in change.items() if key in ("optimizer", "lora", "devices")}
    new = config(**settings) | {key: value for key, value in change.items() if key not in settings}
    with pytest.raises(ConfigError, match=words):
        begin_with(new, FOUND)


def test_all_that_does_not_fit_is_told_at_once() -> None:
    new = config(devices=2, optimizer={"kind": "sgd"}) | {"steps": 3}
    with pytest.raises(ConfigError) as error:
        begin_with(new, FOUND)
    assert len(error.value.message.splitlines()) == 3


@pytest.mark.parametrize(("kind", "lora", "words"), [("rm", None, "reward model"), ("sft", {"r": 4}, "--merged")])
def test_a_model_that_is_no_whole_language_model_is_not_served(kind: str, lora: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        refuse_unless_whole_model({"algorithm": {"kind": kind, "settings": {"lora": lora}}}, "model.uri")


# ---- verify

PREPARED = Result(data={"dataset": {"object": "d"}, "pad": 0})


def result(step: int, **more: Any) -> Result:
    lines = [{"step": n, "loss": 0.1 * n, "seconds": 0.5} for n in (step - 1, step)]
    parts = {"weights": f"w{step}", "rng": "r", "manifest": "m"}
    made = Result(step=step, steps=8, snapshot=f"a{step}", data=PREPARED.data, metrics=lines, parts=parts, weights="h")
    return replace(made, **{"fingerprint": {"threads": 1}} | more)


def training(*results: Result, start: dict[str, Any] | None = None) -> TrainingRun:
    def entry(seq: int, segment: Segment, made: Result) -> CommitEntry:
        return CommitEntry(seq, seq, 1, Outcome.DONE, made.encode(), segment.encode(), b"")

    entries = [entry(0, Segment("prepare"), PREPARED)]
    for seq, made in enumerate(results, 1):
        entries.append(entry(seq, Segment("segment", made.step - 2, 2, start or {} if seq == 1 else {}), made))
    return TrainingRun(pb.RunStatus(spec=pb.RunSpec(run_id="0" * 26)), {}, entries)


RUN = training(*map(result, (2, 4, 6, 8)))


def shape(kept: set[int], wanted: int | None) -> list[tuple[str, int, list[int]]]:
    found = stretches(RUN, kept, wanted)
    return [(one.before.snapshot, one.before.step, [s.number for s in one.segments]) for one in found]


def test_every_kept_snapshot_begins_a_stretch_and_what_was_let_go_is_gone_through() -> None:
    assert shape({1, 2, 3, 4}, None) == [("", 0, [1]), ("a2", 2, [2]), ("a4", 4, [3]), ("a6", 6, [4])]
    assert shape({3, 4}, None) == [("", 0, [1, 2, 3]), ("a6", 6, [4])]
    assert shape(set(), None) == [("", 0, [1, 2, 3, 4])]


def test_one_segment_begins_at_the_newest_snapshot_before_it() -> None:
    assert shape({2, 4}, 3) == [("a4", 4, [3])]
    assert shape({1, 4}, 3) == [("a2", 2, [2, 3])]
    assert shape({2, 4}, 0) == [("a4", 4, [3, 4])], "the last"
    for number in (5, 9):
        with pytest.raises(NotFoundError, match="it has 1 to 4"):
            shape({2}, number)


def test_a_fork_is_verified_from_the_snapshot_that_it_began_with() -> None:
    run = training(result(6), result(8), start={"step": 4, "snapshot": "a4"})
    (stretch,) = stretches(run, set(), None)
    assert (stretch.before.snapshot, stretch.before.step, stretch.before.data) == ("a4", 4, PREPARED.data)
    payload = Segment.decode(stretch.payload())
    assert (payload.op, payload.first, payload.through) == ("verify", 4, [[4, 2], [6, 2]])


def test_a_stretch_is_executed_on_the_hardware_that_it_is_compared_with() -> None:
    assert json.loads(stretches(RUN, {2}, 3)[0].payload())["before"]["fingerprint"] == {"threads": 1}


def test_equal_is_equal_whatever_time_it_took() -> None:
    slower = [line | {"seconds": 9.0} for line in result(4).metrics]
    assert differences(result(4), result(4, metrics=slower)) == ()


def worse(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [lines[0], lines[1] | {"loss": lines[1]["loss"] + 1e-12}]


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ({"snapshot": "other", "parts": result(4).parts | {"rng": "x"}}, ("rng",)),
        ({"snapshot": "other", "parts": result(4).parts | {"weights": "x"}, "weights": "y"}, ("weights",)),
        ({"snapshot": "other"}, ("archive",)),
        ({"metrics": worse(result(4).metrics)}, ("metrics",)),
        ({"metrics": result(4).metrics[:1]}, ("metrics",)),
        ({"evaluations": [{"step": 4, "loss": 1.0}]}, ("evaluations",)),
        ({"snapshot": "other", "fingerprint": {"threads": 2}, "parts": result(4).parts | {"manifest": "x"}}, ()),
    ],
)
def test_what_differs_is_named(change: dict[str, Any], differs: tuple[str, ...]) -> None:
    assert differences(result(4), result(4, **change)) == differs


# ---- what is said of it


class Said(Display):
    def __init__(self) -> None:
        self.events: dict[str, dict[str, Any]] = {}

    def note(self, message: str) -> None: ...

    def progress(self, snapshot: Any) -> None: ...

    def event(self, name: str, message: str, /, **fields: Any) -> None:
        self.events[name] = fields


def verdict(number: int, found: Result | None, failure: Failure | None = None) -> Verdict:
    one = Committed(number, 2 * number - 2, 2, result(2 * number), "made")
    return Verdict(one, found, "again", differences(one.result, found) if found else (), failure)


def conclude(*verdicts: Verdict) -> tuple[int, dict[str, Any]]:
    said = Said()
    job = Verifying(Places(None, False, (), print), "a", None, said, workers=1, different_hardware=False)
    return job.conclude(RUN, list(verdicts)), said.events["verified"]


def test_only_when_all_are_equal_it_ends_with_0() -> None:
    assert conclude(verdict(1, result(2)), verdict(2, result(4)))[0] == 0
    code, said = conclude(verdict(1, result(2)), verdict(2, result(4, snapshot="other")))
    assert (code, said["same"], said["different"], said["failed"]) == (1, 1, [2], [])
    code, said = conclude(verdict(1, result(2)), verdict(2, None, Failure("out_of_memory", "too little")))
    assert (code, said["same"], said["different"], said["failed"]) == (1, 1, [], [2])


def test_other_hardware_is_refused_and_where_it_was_allowed_it_is_said() -> None:
    with pytest.raises(ConfigError, match="--allow-different-hardware"):
        conclude(verdict(1, None, Failure("different_hardware", "threads 1 -> 2")))
    code, said = conclude(verdict(1, result(2, fingerprint={"threads": 2})))
    assert code == 0 and said["different_hardware"] is True

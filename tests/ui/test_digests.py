"""What workloads show of their results."""

from __future__ import annotations

from rollout.model.item import Outcome
from rollout.workloads.commit import CommitEntry
from rollout.workloads.digest import Chart
from rollout.workloads.train.digest import TrainDigest
from rollout.workloads.train.segment import Result, Segment


def segment(first: int, losses: list[float]) -> CommitEntry:
    metrics = [{"step": first + n + 1, "loss": loss, "tokens": 8} for n, loss in enumerate(losses)]
    result = Result(step=first + len(losses), steps=10, metrics=list(metrics))
    payload = Segment("segment", first, len(losses)).encode()
    return CommitEntry(first, first, 1, Outcome.DONE, result.encode(), payload, id=bytes(32))


def loss_of(digest: TrainDigest, **figures: float) -> Chart:
    charts = [part for part in digest.parts(dict(figures)) if isinstance(part, Chart) and part.title == "Loss"]
    return charts[0]


def test_a_curve_goes_on_with_what_the_attempt_under_way_reports() -> None:
    digest = TrainDigest()
    digest.add(segment(0, [3.0, 2.0]))
    assert not loss_of(digest, step=2, loss=2.0).live
    for step in (3, 4):
        chart = loss_of(digest, step=step, loss=1.0 / step)
    assert chart.live == {"loss": [(3, 1 / 3), (4, 0.25)]} and list(chart.newest) == [("loss", (4, 0.25))]
    assert loss_of(digest, step=3, loss=9.0).live == {"loss": [(3, 9.0)]}  # another attempt
    digest.add(segment(2, [1.0, 0.5]))
    chart = loss_of(digest)
    assert chart.live == {} and chart.series["loss"][-1] == (4, 0.5)

"""Inventory and notices of EC2 and Compute Engine, from metadata services on this machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from metadata_server import Ec2, Gce, serving
from rollout.compute import gce as gce_module
from rollout.compute.auto import AutoCompute
from rollout.compute.ec2 import Ec2Compute
from rollout.compute.gce import GceCompute
from rollout.compute.local import LocalCompute
from rollout.compute.metadata import ANSWER_S, CONNECT_S, Metadata
from rollout.compute.opening import open_compute
from rollout.compute.port import Gpu, Preemption
from rollout.config.cloud import CloudSection
from rollout.config.settings import ComputeSection
from rollout.model.errors import ConfigError, UnavailableError
from structlog.testing import capture_logs

AWS, GCP = CloudSection(provider="aws"), CloudSection(provider="gcp")


@pytest.fixture
async def ec2(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Ec2]:
    async with serving(Ec2()) as served:
        assert isinstance(served, Ec2)
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", served.address)
        monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")  # would refuse: nothing goes through it
        yield served


@pytest.fixture
async def gce(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gce]:
    async with serving(Gce()) as served:
        assert isinstance(served, Gce)
        monkeypatch.setenv("GCE_METADATA_HOST", served.address.removeprefix("http://"))
        monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
        yield served


def on_ec2(served: Ec2, here: LocalCompute | None = None, *, drain_on_rebalance: bool = False) -> Ec2Compute:
    metadata = Metadata(served.address)
    return Ec2Compute(here or LocalCompute(), metadata, drain_on_rebalance=drain_on_rebalance, poll_s=0.02)


def on_gce(served: Gce, wait_s: int = 60) -> GceCompute:
    return GceCompute(LocalCompute(), Metadata(served.address), wait_s=wait_s, pause_s=0.02)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():  # noqa: ASYNC110 - what it waits for is told by nobody
            await asyncio.sleep(0.01)


async def notice_of(compute: Ec2Compute | GceCompute) -> Preemption:
    try:
        return await asyncio.wait_for(compute.preemption(), 30)
    finally:
        await compute.close()


# ---- EC2


async def test_ec2_inventory_is_that_of_the_machine_with_labels(ec2: Ec2) -> None:
    compute = open_compute(ComputeSection(), AWS)
    host = await compute.inventory()
    here = await LocalCompute().inventory()
    assert (host.cpus, host.memory_mib, host.gpus) == (here.cpus, here.memory_mib, here.gpus)
    assert dict(host.labels) == {
        "cloud": "aws", "region": "us-west-2", "zone": "us-west-2b", "instance_type": "p5.48xlarge",
        "lifecycle": "spot", "gpu_type": "nvidia-h100",
    }  # fmt: skip
    assert [r[:2] for r in ec2.requests].count(("PUT", "/latest/api/token")) == 1  # one token for all
    await compute.close()


async def test_a_gpu_of_an_unknown_family_is_named_by_its_driver(ec2: Ec2) -> None:
    ec2.paths["/latest/dynamic/instance-identity/document"] = '{"instanceType": "p9.huge"}'
    compute = on_ec2(ec2, LocalCompute(gpus=lambda: (Gpu(0, "NVIDIA H900 1TB", 1),)))
    assert dict((await compute.inventory()).labels)["gpu_type"] == "nvidia-h900-1tb"
    await compute.close()


@pytest.mark.parametrize(("in_s", "lead_s", "budget_s"), [(120, 120, 60), (40, 40, 20), (-5, 0, 0), (600, 120, 60)])
async def test_an_interruption_leaves_the_time_that_it_says(
    ec2: Ec2, in_s: float, lead_s: float, budget_s: float
) -> None:
    """By the service's clock: this machine's is years off."""
    ec2.interrupt(in_s)
    notice = await notice_of(on_ec2(ec2))
    assert (notice.lead_s, notice.budget_s) == (lead_s, budget_s)
    assert "terminate" in notice.reason


async def test_an_interruption_is_heard_through_a_flapping_service_and_a_new_token(ec2: Ec2) -> None:
    compute = on_ec2(ec2)
    with capture_logs() as logs:
        waiting = asyncio.create_task(notice_of(compute))
        await until(lambda: len(ec2.requests) > 5)
        ec2.broken = 4
        await until(lambda: ec2.broken == 0)
        ec2.token = "token-2"
        ec2.interrupt(100, "stop")
        assert (await waiting).budget_s == 50
    assert [line["event"] for line in logs].count("metadata_unanswered") == 1


@pytest.mark.parametrize("drains", [False, True])
async def test_a_rebalance_recommendation_is_a_hint(ec2: Ec2, drains: bool) -> None:
    ec2.paths["/latest/meta-data/events/recommendations/rebalance"] = '{"noticeTime": "2030-01-01T12:00:00Z"}'
    compute = on_ec2(ec2, drain_on_rebalance=drains)
    with capture_logs() as logs:
        waiting = asyncio.create_task(notice_of(compute))
        await until(lambda: any(line["event"] == "rebalance_recommended" for line in logs))
        if not drains:
            asked = len(ec2.requests)
            await until(lambda: len(ec2.requests) > asked + 3)
            assert not waiting.done()
            ec2.interrupt(120)
        assert ("rebalance" in (await waiting).reason) is drains
    assert [line["event"] for line in logs].count("rebalance_recommended") == 1


async def test_a_silent_token_request_is_the_hop_limit(ec2: Ec2, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.compute.watching.PAUSE_S", 0.01)
    monkeypatch.setattr("rollout.compute.metadata.ANSWER_S", 0.1)
    monkeypatch.setattr(Metadata.ask, "__kwdefaults__", {"answer_s": 0.1})
    ec2.silent = True
    compute = open_compute(ComputeSection(backend="ec2"), AWS)
    with pytest.raises(ConfigError, match=r"hop limit of 1.*--http-put-response-hop-limit 2.*HttpPutResponseHopLimit"):
        await compute.inventory()
    await compute.close()


async def test_a_service_that_is_switched_off_is_told_of(ec2: Ec2) -> None:
    ec2.token_status = 403
    compute = on_ec2(ec2)
    with pytest.raises(UnavailableError, match=r"switched off.*--http-endpoint enabled"):
        await compute.notice()
    await compute.close()


@pytest.mark.parametrize("drips", [True, False])
async def test_an_answer_that_is_not_whole_in_time_hides_no_notice(
    ec2: Ec2, monkeypatch: pytest.MonkeyPatch, drips: bool
) -> None:
    monkeypatch.setattr(Metadata.ask, "__kwdefaults__", {"answer_s": 0.1})
    compute = on_ec2(ec2)
    await compute.notice()
    ec2.interrupt(120)
    ec2.silent, ec2.drips = not drips, drips
    waiting = asyncio.create_task(notice_of(compute))
    asked = len(ec2.requests)
    await until(lambda: len(ec2.requests) > asked + 2)
    ec2.silent = ec2.drips = False
    assert (await waiting).lead_s == 120


# ---- Compute Engine


async def test_gce_inventory_is_that_of_the_machine_with_labels(gce: Gce) -> None:
    compute = open_compute(ComputeSection(), GCP)
    host = await compute.inventory()
    assert dict(host.labels) == {
        "cloud": "gcp", "region": "us-central1", "zone": "us-central1-a", "instance_type": "a3-highgpu-8g",
        "lifecycle": "spot", "gpu_type": "nvidia-h100",
    }  # fmt: skip
    await compute.close()


async def test_a_preemption_ends_the_hanging_request(gce: Gce) -> None:
    compute = on_gce(gce)
    waiting = asyncio.create_task(notice_of(compute))
    await until(lambda: sum("wait_for_change" in path for _, path, _ in gce.requests) == 2)
    asked = len(gce.requests)
    gce.set("instance/preempted", "TRUE")
    notice = await waiting
    assert notice.lead_s == pytest.approx(30, abs=2)
    assert notice.budget_s == pytest.approx(15, abs=1)
    assert len(gce.requests) <= asked + 1


async def test_a_preemption_that_had_begun_before_is_found_at_the_first_look(gce: Gce) -> None:
    gce.values["instance/preempted"] = "TRUE"
    notice = await notice_of(on_gce(gce))
    assert (notice.lead_s, notice.budget_s) == (15, 7.5)


async def test_maintenance_that_ends_the_machine_is_notice_and_a_move_is_not(gce: Gce) -> None:
    compute = on_gce(gce)
    with capture_logs() as logs:
        waiting = asyncio.create_task(notice_of(compute))
        await until(lambda: sum("wait_for_change" in path for _, path, _ in gce.requests) == 2)
        gce.set("instance/maintenance-event", "MIGRATE_ON_HOST_MAINTENANCE")
        await until(lambda: any(line["event"] == "maintenance_migrates" for line in logs))
        assert not waiting.done()
        gce.set("instance/maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")
        notice = await waiting
    assert notice.lead_s == pytest.approx(60, abs=2)
    assert "maintenance" in notice.reason


async def test_a_preemption_is_heard_through_a_flapping_server(gce: Gce) -> None:
    compute = on_gce(gce, wait_s=1)
    waiting = asyncio.create_task(notice_of(compute))
    await until(lambda: len(gce.requests) > 3)
    gce.broken = 6
    gce.change()
    await until(lambda: gce.broken == 0)
    gce.set("instance/preempted", "TRUE")
    notice = await waiting
    assert 20 < notice.lead_s <= 30


def test_a_request_that_hangs_is_given_up_well_before_the_end_of_a_preemption() -> None:
    assert gce_module.WAIT_S + ANSWER_S + CONNECT_S < gce_module.LEAD_S / 2


async def test_a_preemption_is_heard_though_the_wait_for_it_hangs(gce: Gce, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gce_module, "ANSWER_S", 0.1)
    compute = on_gce(gce, wait_s=0)
    waiting = asyncio.create_task(notice_of(compute))
    await until(lambda: len(gce.requests) > 3)
    gce.silent = True
    asked = len(gce.requests)
    await until(lambda: len(gce.requests) > asked + 1)
    gce.values["instance/preempted"] = "TRUE"
    gce.silent = False
    assert (await waiting).lead_s > 0


async def test_another_server_at_that_address_is_not_believed(gce: Gce) -> None:
    gce.flavor = "Other"
    gce.values["instance/preempted"] = "TRUE"
    compute = on_gce(gce)
    with pytest.raises(UnavailableError, match="not Google's"):
        await compute.notice()
    await compute.close()


# ---- which backend


@pytest.mark.parametrize("cloud", [AWS, GCP])
async def test_off_a_cloud_it_is_the_local_one_and_starts_fast(
    cloud: CloudSection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", raising=False)
    monkeypatch.delenv("GCE_METADATA_HOST", raising=False)
    monkeypatch.setattr("rollout.compute.metadata.LINK_LOCAL", "192.0.2.1")  # nobody answers there
    compute = open_compute(ComputeSection(), cloud)
    began = time.monotonic()
    with capture_logs() as logs:
        host = await compute.inventory()
    assert time.monotonic() - began < 2  # 0.6 s alone
    assert host.labels == ()
    assert [(line["event"], line["log_level"]) for line in logs] == [("compute_is_local", "debug")]
    await compute.close()


async def test_a_backend_that_is_named_must_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.compute.watching.PAUSE_S", 0.01)
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    compute = open_compute(ComputeSection(backend="gce"), GCP)
    with pytest.raises(ConfigError, match=r'\[compute\] backend = "gce".*does not answer'):
        await compute.inventory()
    await compute.close()


async def test_on_a_machine_of_that_cloud_silence_is_tried_again_and_told(
    ec2: Ec2, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vendor = tmp_path / "sys/class/dmi/id/sys_vendor"
    vendor.parent.mkdir(parents=True)
    vendor.write_text("Amazon EC2\n")
    monkeypatch.setattr("rollout.compute.auto.PAUSE_S", 0.01)
    for broken, labels in ((2, True), (3, False)):
        ec2.broken = broken
        compute = AutoCompute(on_ec2(ec2), LocalCompute(), tmp_path)
        with capture_logs() as logs:
            assert bool((await compute.inventory()).labels) is labels
        assert [line["log_level"] for line in logs] == ([] if labels else ["warning"])
        await compute.close()


async def test_a_service_that_fails_after_its_first_answer_keeps_no_worker_from_starting(
    ec2: Ec2, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tried again; then without labels. Notices are heard later."""
    monkeypatch.setattr("rollout.compute.watching.PAUSE_S", 0.01)
    for failures in (2, 3):
        there = on_ec2(ec2)
        assert await there.why_silent() == ""
        compute = AutoCompute(there, LocalCompute())
        assert await compute._choose() is there
        ec2.broken = failures
        with capture_logs() as logs:
            assert bool((await compute.inventory()).labels) is (failures == 2)
        assert [line["event"] for line in logs] == ([] if failures == 2 else ["compute_has_no_labels"])
        if failures == 2:
            await compute.close()
            continue
        ec2.interrupt(100)
        assert (await asyncio.wait_for(compute.preemption(), 30)).budget_s == 50
        await compute.close()


async def test_the_file_gives_notice_in_a_cloud_too(ec2: Ec2, tmp_path: Path) -> None:
    file = tmp_path / "preempt"
    compute = open_compute(ComputeSection(preemption_file=str(file)), AWS)
    waiting = asyncio.create_task(compute.preemption())
    file.write_text("by hand")
    assert (await asyncio.wait_for(waiting, 30)).reason == "by hand"
    await compute.close()

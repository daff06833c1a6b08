"""Training with its objects in a bucket: what goes on from a snapshot there ends in the bytes of what never stopped."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, binary, write_toml
from gcs_emulator import Gcs
from moto_locked import AwsEmulator
from rollout.config.cloud import CloudSection
from rollout.config.settings import EmbeddedStorage, ObjectsSection, StorageSection
from rollout.objects.opening import open_store
from rollout.snapshots.tar import unpack

for _ in ("training", "acceptance"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / _))

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

HALF, STEPS = 3, 6
SETTINGS: dict[str, Any] = {
    "minibatch_size": 4, "gradient_accumulation": 2, "budget": {"max_steps": STEPS}, "disable_dropout": False,
    "optimizer": {"lr": 1e-3, "schedule": "cosine", "warmup_steps": 2}, "seed": 7,
}  # fmt: skip


@dataclass
class Place:
    """A provider's bucket: its `[cloud]`, and what a person's tool sees in it."""

    cloud: CloudSection
    keys: Callable[[], list[str]]
    read: Callable[[str], bytes]
    write: Callable[[str, bytes], None]

    def sections(self) -> dict[str, dict[str, Any]]:
        """For a configuration file."""
        given = self.cloud.model_dump(exclude_unset=True, mode="json")
        inner = {f"cloud.{key}": value for key, value in given.items() if isinstance(value, dict)}
        return {"cloud": {key: value for key, value in given.items() if f"cloud.{key}" not in inner}} | inner

    def copy_to(self, other: Place) -> None:
        """By hand: the objects, under the same names."""
        for key in self.keys():
            if "cas/" in key:
                other.write(key, self.read(key))


@pytest.fixture
def s3(aws: AwsEmulator) -> Place:
    name = aws.bucket()
    cloud = aws.cloud(s3={"bucket": name, "prefix": "runs/"})
    return Place(
        cloud,
        lambda: aws.keys(name),
        lambda key: aws.body(name, key),
        lambda key, body: aws.s3.put_object(Bucket=name, Key=key, Body=body),
    )


@pytest.fixture
def gs(gcs: Gcs) -> Place:
    return Place(gcs.cloud(prefix="runs/"), gcs.names, gcs.content, gcs.put)


async def pieces(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(1 << 18):
            yield piece


async def kept(place: Place, directory: Path, tar: Path, name: bytes) -> None:
    """As the coordinator keeps it: by the configured store."""
    store = open_store(ObjectsSection(), _storage(directory), place.cloud)
    await store.open()
    assert await store.put(name, pieces(tar), tar.stat().st_size)
    await store.close()


async def brought(place: Place, directory: Path, name: bytes, into: Path) -> None:
    store = open_store(ObjectsSection(), _storage(directory), place.cloud)
    await store.open()
    tar = into.with_suffix(".brought")
    async with aclosing(store.get(name)) as found:
        tar.write_bytes(b"".join([piece async for piece in found]))
    await store.close()
    unpack(tar, into, name)


def _storage(directory: Path) -> StorageSection:
    return StorageSection(backend="embedded", embedded=EmbeddedStorage(path=str(directory / "rollout.db")))


async def test_a_snapshot_in_a_bucket_goes_on_to_the_same_bytes(s3: Place, gs: Place, tmp_path: Path) -> None:
    """From S3, from GCS, and from GCS after it was copied there by hand from S3."""
    import torch
    from rollout_worker.backends.training.state import seed_everything
    from training_rig import Rig, make_small, rows_of

    torch.set_num_threads(1)
    make_small(tmp_path / "model", "0123456789 abcdefghijklmnopqrstuvwxyz,", attention_dropout=0.1)
    rig = Rig(tmp_path / "model", tmp_path)
    trainer = rig.trainer("sft", rows_of("sft"), **SETTINGS)
    list(trainer.run(0, HALF))
    name = bytes.fromhex(rig.snapshot(trainer, "half"))
    list(trainer.run(HALF, STEPS - HALF))
    whole = rig.snapshot(trainer, "whole")

    await kept(s3, tmp_path, tmp_path / "half.tar", name)
    s3.copy_to(gs)
    await brought(s3, tmp_path, name, tmp_path / "from-s3")
    await brought(gs, tmp_path, name, tmp_path / "copied")
    await kept(gs, tmp_path, tmp_path / "whole.tar", bytes.fromhex(whole))
    assert len(gs.keys()) == 2 and set(s3.keys()) < set(gs.keys()), "one layout"
    for state in ("from-s3", "copied"):
        resumed = rig.trainer("sft", rows_of("sft"), **SETTINGS)
        seed_everything(12345, 0)
        resumed.restore(tmp_path / state)
        list(resumed.run(HALF, STEPS - HALF))
        assert rig.snapshot(resumed, f"{state}-end") == whole


# Whole runs, on clusters whose coordinator has [cloud].

EVERY, LONG = 4, 24


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rt-", ignore_cleanup_errors=True) as root:
        yield Path(root)


def configure(cli: Any, name: str) -> str:
    rows = [{"prompt": f"{n} and {n} is", "completion": f" {2 * n}"} for n in range(40)]
    (cli.directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = cli.directory / f"{name}.toml"
    path.write_text(f"""
[algorithm]
kind = "sft"
[algorithm.sft]
base_model.uri = "tiny"
dataset.path = "rows.jsonl"
minibatch_size = 4
optimizer = {{ lr = 1e-3, schedule = "cosine", warmup_steps = 3 }}
budget.max_steps = {LONG}
disable_dropout = false
seed = 7
[snapshots]
every_steps = {EVERY}
keep_last = 1000
[output]
dir = "{name}"
[run]
max_worker_lost = 1000
""")
    return path.name


def ended(cli: Any, name: str) -> dict[str, Any]:
    summary = json.loads((cli.directory / name / "summary.json").read_text())
    return {key: summary[key] for key in ("state", "steps", "final_snapshot", "weights_hash")}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", ["s3", "gcs", "s3 to gcs"])
def test_a_run_that_is_killed_and_moved_ends_in_the_same_bytes(
    way: str, s3: Place, gs: Place, directory: Path, tmp_path: Path
) -> None:
    """Worker and coordinator are killed. `s3 to gcs`: meanwhile the objects are copied, and `[cloud]` names the other."""
    from acceptance_cli import Cli, until
    from rollout_worker.backends.tiny import make_tiny

    cli = Cli(tmp_path, {"XDG_STATE_HOME": str(tmp_path / ".state"), "XDG_CONFIG_HOME": str(tmp_path / ".config")})
    make_tiny(tmp_path / "tiny")
    calm = cli.run("train", "sft", "--config", configure(cli, "calm"), timeout=200)
    assert calm.code == 0, calm
    first = gs if way == "gcs" else s3
    quick: dict[str, Any] = {
        "heartbeat_interval_ms": 250,
        "worker_self_fence_timeout_ms": 2000,
        "coordinator_failure_timeout_ms": 2500,
    }
    with Cluster(directory, transport=quick) as cluster:
        coordinator = cluster.add_coordinator(others=None, start=True, **first.sections())
        coordinator.wait_event("coordinator_ready")
        worker = cluster.add_worker()
        process = cli.start("train", "sft", "--config", configure(cli, "out"), *cluster.operator())
        before = time.monotonic()
        metrics = tmp_path / "out" / "metrics.jsonl"
        until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= EVERY, "a segment", timeout=120)
        worker.kill()
        coordinator.kill()
        config = directory / "coordinator-1" / "coordinator.toml"
        if way == "s3 to gcs":
            first.copy_to(gs)
            kept_lines = config.read_text().split("[cloud]")[0]
            config.write_text(kept_lines + write_toml(tmp_path / "cloud.toml", gs.sections()).read_text())
            subprocess.run(
                [binary("rollout-coordinator"), "adopt-objects", "--config", str(config)],
                cwd=config.parent,
                check=True,
                capture_output=True,
                timeout=120,
            )
        coordinator.start()
        worker.start()
        out, err = process.communicate(timeout=200)
        assert process.returncode == 0, (out, err, time.monotonic() - before)
    assert ended(cli, "out") == ended(cli, "calm")
    last = gs if "gcs" in way else s3
    final = ended(cli, "out")["final_snapshot"]
    names = last.keys()
    assert any(key.endswith(final) for key in names)

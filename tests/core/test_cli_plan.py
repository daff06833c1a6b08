"""`rollout plan` tells by the sections of a file whose it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from rollout.cli.cloud_lines import workload_lines
from rollout.cli.commands.plan import kind_of
from rollout.config.cloud import CloudSection
from rollout.model.errors import ConfigError


@pytest.mark.parametrize(
    ("sections", "kind"),
    [
        ("storage", "coordinator"),
        ("transport worker", "worker"),
        ("model input output", "infer"),
        ("model input output run workers", "infer"),
        ("function input output run workers", "map"),
        ("modle input output", "infer"),
        ("fuction input output", "map"),
        ("algorithm output", "train"),
        ("algorithm snapshots output run workers", "train"),
        ("worker objects model", "worker"),
    ],
)
def test_kinds(tmp_path: Path, sections: str, kind: str) -> None:
    path = tmp_path / "file.toml"
    path.write_text("".join(f"[{section}]\n" for section in sections.split()))
    assert kind_of(path) == kind


def test_a_file_of_nobody(tmp_path: Path) -> None:
    (tmp_path / "odd.toml").write_text("[odd]\n")
    with pytest.raises(ConfigError, match=r"no known configuration: a coordinator's has \[storage\], .* found odd"):
        kind_of(tmp_path / "odd.toml")


@pytest.mark.parametrize("queued", [True, False])
def test_queues_are_told_once(queued: bool) -> None:
    """By the workload that takes rows from them, else by the section."""
    cloud = CloudSection.model_validate(
        {
            "provider": "aws",
            "region": "eu-west-1",
            "sqs": {"queue_url": "https://sqs.eu-west-1.amazonaws.com/123456789012/q"},
        }
    )
    told = [line for line in workload_lines(cloud, private=Path("out/.rollout"), queued=queued) if "012/q" in line]
    assert len(told) == (0 if queued else 1)

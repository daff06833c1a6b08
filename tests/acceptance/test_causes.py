"""A model that cannot be loaded: its user is told, no row is harmed, and the same command goes on when it is there."""

from __future__ import annotations

from pathlib import Path

import pytest
from acceptance_cli import Cli


@pytest.mark.engine
def test_a_model_that_is_not_there_ends_the_command_which_goes_on_when_it_is(cli: Cli, tmp_path: Path) -> None:
    from rollout_worker.backends.tiny import make_tiny

    cache = tmp_path / "hub"
    cli.env |= {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache)}
    cli.rows(3)
    config = cli.config(
        model={"uri": "acme/absent"}, backend={"kind": "transformers", "device": "cpu"}, sampling={"max_tokens": 4}
    )
    done = cli.run("infer", "batch", "--config", str(config), "--json")
    cause, summary = done.event("cause"), done.event("summary")
    assert (done.code, cause["code"], cause["everywhere"]) == (1, "model_missing", True)
    assert "acme/absent is not on this worker" in cause["message"] and cause["message"] in summary["reason"]
    assert (summary["state"], summary["rows"]["failed"], summary["rows"]["committed"]) == ("failed", 0, 0)

    model = cache / "models--acme--absent"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("a" * 40)
    make_tiny(model / "snapshots" / ("a" * 40))
    done = cli.run("infer", "batch", "--config", str(config), "--json")
    assert (done.code, done.event("summary")["rows"]["completed"]) == (0, 3)

"""Why a model cannot be loaded: soon, in a sentence, and whether another try may help."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rollout.model.errors import AttemptError
from rollout_worker.backends.loading import find_on_hub, load_failure
from rollout_worker.processes.child import last_error, last_line


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The hub's client with an empty cache, and a port where nobody listens in the hub's place."""
    pytest.importorskip("huggingface_hub")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return constants


def refusal(name: str) -> AttemptError:
    with pytest.raises(AttemptError) as caught:
        find_on_hub(name, None)
    return caught.value


@pytest.mark.engine
def test_a_hub_that_is_forbidden(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    error = refusal("acme/absent")
    assert (error.error_code, error.retry) == ("model_missing", False)
    assert "acme/absent is not on this worker" in error.message and "HF_HUB_OFFLINE=1" in error.message


@pytest.mark.engine
def test_a_hub_that_cannot_be_reached(hub: Any) -> None:
    error = refusal("acme/absent")
    assert (error.error_code, error.retry) == ("model_unreachable", True)
    assert "cannot be reached" in error.message and "HF_ENDPOINT" in error.message


def test_a_path_that_is_no_directory() -> None:
    error = refusal("/models/absent")
    assert (error.error_code, error.retry) == ("model_missing", False) and "no directory" in error.message


def test_a_directory_is_not_looked_for(tmp_path: Path) -> None:
    find_on_hub(str(tmp_path), None)


def test_memory_that_another_holds_may_be_free_later() -> None:
    error = load_failure("the model m cannot be loaded", RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert (error.error_code, error.retry) == ("out_of_device_memory", True)
    error = load_failure("the model m cannot be loaded", ValueError("no such dtype\n" + "trace\n" * 500))
    assert (error.error_code, error.retry) == ("model_load_failed", False) and len(error.message) < 700


def test_the_last_words_of_a_process() -> None:
    output = b"loading\nTraceback (most recent call last):\nValueError: no such head size\nRuntimeError: see root cause above\n\n"
    assert last_line(b"first\nthe disk is gone\n\n") == "the disk is gone"
    assert last_error(output) == "ValueError: no such head size"
    assert last_error(b"nothing wrong") == last_line(b"") == ""

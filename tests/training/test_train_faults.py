"""Steps that cannot be taken: typed, with the rows they train on, before anything is changed by them."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout.model.errors import AttemptError
from rollout.processes.framing import receive_message, send_message
from rollout_worker.backends.training.rank import Rank
from rollout_worker.backends.training.trainer import Trainer
from training_rig import Rig, make_small, rows_of

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_small(directory, "0123456789abcdefghijklmnopqrstuvwxyz ,.", hidden=16, layers=1)
    return directory


def broken(trainer: Trainer) -> None:
    with torch.no_grad():
        next(trainer.plain.parameters()).fill_(float("nan"))


def exploding(trainer: Trainer) -> None:
    trainer.step, trainer.first_loss = 1, 1e-6
    with torch.no_grad():
        for parameter in trainer.plain.parameters():
            parameter.mul_(100)


def frozen(trainer: Trainer) -> None:
    trainer.plain.requires_grad_(False)


def without_memory(trainer: Trainer) -> None:
    def loss(*_: Any) -> Any:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: 131072")

    trainer.algorithm.loss = loss  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("spoil", "code", "says"),
    [
        (broken, "loss_not_finite", "the loss is nan and the gradient's norm nan at step 1, which trains on the rows "),
        (exploding, "loss_exploded", "at step 2, which trains on the rows "),
        (frozen, "loss_without_gradient", "depends on nothing that is trained at step 1, which trains on the rows "),
        (without_memory, "out_of_memory", "at step 1 with a minibatch of 4 rows, the longest of "),
    ],
)
def test_a_step_that_cannot_be_taken(
    model: Path, tmp_path: Path, spoil: Callable[[Trainer], None], code: str, says: str
) -> None:
    trainer = Rig(model, tmp_path).trainer("sft", rows_of("sft", 8), budget={"max_steps": 4}, optimizer={"lr": 1e-3})
    spoil(trainer)
    before = [parameter.clone() for parameter in trainer.plain.parameters()]
    with pytest.raises(AttemptError) as failed:
        list(trainer.run(trainer.step, 1))
    assert (failed.value.error_code, failed.value.retry) == (code, False)
    assert says in failed.value.message
    for old, new in zip(before, trainer.plain.parameters(), strict=True):
        torch.testing.assert_close(new.detach(), old.detach(), rtol=0, atol=0, equal_nan=True)


def test_a_step_of_which_nothing_is_supervised(model: Path, tmp_path: Path) -> None:
    trainer = Rig(model, tmp_path).trainer("sft", rows_of("sft", 8), budget={"max_steps": 4}, optimizer={"lr": 1e-3})
    trainer.collator.data.learnt[:] = 0
    with pytest.raises(
        AttemptError, match="there is no supervised token at step 1, which trains on the rows "
    ) as failed:
        list(trainer.run(0, 1))
    assert (failed.value.error_code, failed.value.retry) == ("no_supervised_token", False)


@pytest.mark.parametrize(
    ("operation", "error", "code", "retry"),
    [
        ("prepare", TypeError("no text"), "invalid_data", False),
        ("prepare", OSError("a disk that comes and goes"), "trainer_failed", True),
        ("build", TypeError("no text"), "trainer_failed", True),
    ],
)
def test_what_a_library_cannot_take_of_the_data_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, operation: str, error: Exception, code: str, retry: bool
) -> None:
    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr(Rank, f"_{operation}", fails)
    mine, other = socket.socketpair()
    with mine:
        send_message(mine, {"number": 1, "op": operation})
        mine.shutdown(socket.SHUT_WR)
        Rank(other.detach()).main()
        answer = receive_message(mine)
    assert answer is not None
    answer = answer["error"]
    assert (answer["code"], answer["retry"]) == (code, retry) and str(error) in answer["message"]

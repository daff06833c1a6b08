"""A training process: one rank, which executes its executor's commands one at a time.

`python -m rollout_worker.backends.training.rank FD THREADS PARENT_PID`: commands and answers are lines of JSON on the
socket FD. All ranks get the same commands; rank 0 answers, and any rank in which something failed. The process ends
with the one that started it.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from rollout.model.errors import AttemptError, RolloutError
from rollout.model.problems import problems
from rollout.processes.framing import receive_message, send_message
from rollout.processes.lifeline import die_with_parent
from rollout.workloads.train.config import SECTIONS, Kind, TrainingSection
from rollout.workloads.train.policy_config import PolicySection
from rollout.workloads.train.segment import stopping_after

from rollout_worker.backends.training.determinism import fingerprint, make_deterministic
from rollout_worker.backends.training.faults import is_full, of_its_input, out_of_memory, ran_out_of_memory

FULL_WAIT_S = 2.0
"""Interval between two tries to write a snapshot to a full disk."""


class Rank:
    def __init__(self, fd: int) -> None:
        self._executor = socket.socket(fileno=fd)
        self._lock = threading.Lock()
        self._trainer: Any = None
        self._writing: threading.Thread | None = None
        self._number = 0
        self._settings: TrainingSection | None = None

    def main(self) -> None:
        while (command := receive_message(self._executor)) is not None:
            self._number = command["number"]
            operation: Callable[[dict[str, Any]], None] = getattr(self, f"_{command['op']}")
            try:
                operation(command)
            except AttemptError as error:
                self._fail(error.message, error.error_code, error.retry)
            except RolloutError as error:
                self._fail(error.message, error.code, False)
            except Exception as error:  # noqa: BLE001 - of libraries and user code: whatever it is, it is told
                traceback.print_exc()
                self._fail(*self._library_fault(error, command["op"]))
        self._wait()

    def ask(self, **question: Any) -> dict[str, Any]:
        """Ask the executor of all ranks during a command, and return its reply."""
        self._say(**question)
        return receive_message(self._executor) or {}

    def _say(self, number: int = 0, **answer: Any) -> None:
        """Answer the command `number`, or the current one. Rank 0 answers for all, except for a failure of one rank
        alone: the others would wait for it for ever."""
        if os.environ.get("RANK", "0") != "0" and "error" not in answer:
            return
        with self._lock:
            send_message(self._executor, {**answer, "number": number or self._number})

    def _fail(self, message: str, code: str, retry: bool, number: int = 0) -> None:
        self._say(number, error={"message": message, "code": code, "retry": retry})

    def _library_fault(self, error: Exception, operation: str) -> tuple[str, str, bool]:
        """Return (message, code, whether another try may help)."""
        if ran_out_of_memory(error) and self._settings is not None:
            return out_of_memory(self._settings, error), "out_of_memory", False
        if operation == "prepare" and of_its_input(error):
            return f"the rows cannot be made tokens: {type(error).__name__}: {error}", "invalid_data", False
        code = "disk_full" if is_full(error) else "trainer_failed"
        return f"{type(error).__name__}: {error}", code, True

    # ---- commands

    def _prepare(self, command: dict[str, Any]) -> None:
        from rollout_worker.backends.training.prepare import (
            ROOM,
            check_vocabulary,
            files_of,
            pad_of,
            positions_of,
            prepared,
            read_config,
            read_tokenizer,
        )
        from rollout_worker.backends.training.prepare_prompts import check_reward_tokenizer

        kind = cast(Kind, command["kind"])
        settings = SECTIONS[kind].model_validate(command["settings"])
        model, other, revision = command["model"], command.get("tokenizer"), settings.base_model.revision
        tokenizer = read_tokenizer(other or model, None if other else revision)
        config = read_config(model, revision)
        check_vocabulary(tokenizer, config)
        for name, path in command.get("reward_models", {}).items():
            check_reward_tokenizer(tokenizer, read_tokenizer(path), name)
        answer: dict[str, Any] = {}
        faults: list[str] = []
        for name, given in command["datasets"].items():
            path = Path(command["directory"]) / name
            files, cache = files_of(given, Path(given["root"])), Path(command["cache"])
            try:
                units, report = prepared(
                    kind,
                    settings,
                    files,
                    tokenizer,
                    path,
                    cache,
                    ROOM // len(command["datasets"]),
                    positions_of(config),
                )
            except AttemptError as error:
                if error.error_code != "invalid_data":
                    raise
                faults.append(error.message)
                continue
            answer[name] = {"path": str(path), "report": report, "units": units}
        if faults:
            raise AttemptError(problems(faults), code="invalid_data", retry=False)
        self._say(done={"datasets": answer, "pad": pad_of(tokenizer)})

    def _build(self, command: dict[str, Any]) -> None:
        from rollout_worker.algorithms.registered import make_algorithm
        from rollout_worker.backends.training.trainer import Job, JudgeOf, RowTrainer

        kind = cast(Kind, command["kind"])
        settings = self._settings = SECTIONS[kind].model_validate(command["settings"])
        self._wait()
        self._trainer = None
        job = Job(
            kind,
            settings,
            Path(command["data"]),
            command["model"],
            command["pad"],
            command.get("reference"),
            Path(command["eval_data"]) if command.get("eval_data") else None,
            command.get("tokenizer"),
            tuple(JudgeOf(**one) for one in command.get("judges", ())),
        )
        if isinstance(settings, PolicySection):
            from rollout_worker.backends.training.exchange import ask_for_rollouts

            self._trainer = ask_for_rollouts(self, job, settings, command["dtype"])
        else:
            self._trainer = RowTrainer(job, make_algorithm(kind, settings))
        trainer = self._trainer
        found = fingerprint(
            trainer.accelerator.device.type,
            precision=settings.precision,
            threads=settings.threads,
            world=trainer.world,
            strategy=settings.strategy,
            attention=settings.attention,
            compiled=settings.compile,
        )
        every, trained = trainer.parameters
        self._say(done={"fingerprint": found, "parameters": every, "trained": trained, "steps": trainer.plan.steps})

    def _restore(self, command: dict[str, Any]) -> None:
        self._trainer.restore(Path(command["directory"]))
        self._trainer.accelerator.wait_for_everyone()  # the directory is removed when rank 0 has answered
        self._say(done={"step": self._trainer.step})

    def _run(self, command: dict[str, Any]) -> None:
        """Run steps, reporting each as it ends; `staged` when the state is in memory, `done` when it is in the
        directory. `under_way` reports work of unknown duration, with a name if users should know it. Every rank gets
        the same loss of an evaluation, and so stops at the same one."""
        trainer, stopping, ends = self._trainer, command["stopping"], False
        rule = trainer.settings.eval
        every, last = rule.every_steps, min(command["first"] + command["steps"], trainer.plan.steps)
        versions = {int(version): files for version, files in command.get("versions", {}).items()}
        trainer.begin(Path(command["exchange"]) if command.get("exchange") else None, versions)
        for metrics in trainer.run(command["first"], command["steps"]):
            self._say(step=metrics, speed=trainer.speed, **trainer.told())
            step = metrics["step"]
            if trainer.job.eval_data is not None and (step % every == 0 if every else step == last):
                self._say(under_way="evaluating")
                if (found := trainer.evaluate()) is not None:
                    stopping, ends = stopping_after(stopping, step, found["loss"], rule.patience, rule.min_delta)
                    self._say(evaluation={"step": step, **found}, stopping=stopping, ends=ends)
                if ends:
                    break
            if command.get("leave") and trainer.agreed(Path(command["leave"]).exists()):
                break
        captured = trainer.capture(command["manifest"])
        self._say(under_way="")
        self._wait()  # of the segment before: two states at most are in memory
        self._say(staged={"step": trainer.step})
        if captured is None:
            return
        directory, number = Path(command["directory"]), self._number

        def written() -> None:
            from rollout_worker.backends.training.state import write

            while True:
                try:
                    write(captured, directory)
                except Exception as error:  # noqa: BLE001 - or nobody would ever hear of it
                    shutil.rmtree(directory, ignore_errors=True)
                    if not is_full(error):
                        self._fail(f"the snapshot cannot be written: {error}", "disk", True, number)
                        return
                    self._say(number, full=str(error))
                    time.sleep(FULL_WAIT_S)
                else:
                    self._say(number, done={"weights": captured.digest()})
                    return

        self._writing = threading.Thread(target=written)
        self._writing.start()

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.join()
            self._writing = None


if __name__ == "__main__":
    die_with_parent(int(sys.argv[3]))
    make_deterministic(int(sys.argv[2]))
    Rank(int(sys.argv[1])).main()

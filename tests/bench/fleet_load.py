"""Many workers in one process that hold rows and tell of them, as workers with engines do, beside their beats.

Run: python tests/bench/fleet_load.py ADDRESS TLS_DIR COUNT ROWS LEAST_S MOST_S
ROWS are in hand at each worker; each of them takes LEAST_S to MOST_S seconds, and no processor time.
"""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path
from typing import Any

from beat_load import EOF, Load, main
from rollout.wire import event_loop
from rollout.wire.v1 import common_pb2, work_pb2
from rollout_worker.attempts import AttemptKey, keys_from_wire, keys_to_wire
from rollout_worker.credit import CreditKeeper
from rollout_worker.linger import linger

RESULT = b"r" * 200


class Fleet(Load):
    def __init__(self, address: str, tls_dir: Path, rows: int, seconds: tuple[float, float]) -> None:
        super().__init__(address, tls_dir, rows)
        self._seconds = seconds
        self.held = self.accepted = self.messages = 0
        self.answers: list[float] = []

    def figures(self) -> dict[str, float]:
        answers, self.answers = sorted(self.answers) or [0.0], []
        return {
            **super().figures(), "held": self.held, "accepted": self.accepted, "messages": self.messages,
            "answer_s": answers[len(answers) // 2],
            "late_answer_s": answers[len(answers) * 99 // 100],
        }  # fmt: skip

    async def _watch(self, call: Any, epoch: int, session: str) -> None:
        worker = Worker(self, call, epoch, session, self._seconds)
        telling = asyncio.create_task(worker.tell())
        while (frame := await call.read()) is not EOF:
            worker.hear(frame)
        telling.cancel()
        self.lost += 1


class Worker:
    def __init__(self, fleet: Fleet, call: Any, epoch: int, session: str, seconds: tuple[float, float]) -> None:
        self._fleet = fleet
        self._call = call
        self._envelope = {"epoch": epoch, "session": session}
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._started: list[AttemptKey] = []
        self._ended: list[AttemptKey] = []
        self._sent: dict[AttemptKey, float] = {}
        self._credit = CreditKeeper(1, 0)  # for its measure of an answer

    def hear(self, frame: work_pb2.WorkDown) -> None:
        body = frame.WhichOneof("body")
        if body == "assign":
            for group in frame.assign.groups:
                for seq, attempt in zip(group.seq, group.attempt, strict=True):
                    key = AttemptKey(group.log, seq, attempt)
                    self._started.append(key)
                    self._loop.call_later(random.uniform(*self._seconds), self._ends, key)
                self._fleet.held += len(group.seq)
            self._news.set()
        elif body == "accepted":
            self._answered(keys_from_wire(frame.accepted.accepted))

    def _ends(self, key: AttemptKey) -> None:
        self._ended.append(key)
        self._news.set()

    def _answered(self, keys: list[AttemptKey]) -> None:
        seconds = [self._loop.time() - self._sent.pop(key) for key in keys]
        if seconds:
            self._credit.answered(min(seconds))
        self._fleet.answers += seconds
        self._fleet.held -= len(keys)
        self._fleet.accepted += len(keys)

    async def tell(self) -> None:
        told = 0.0
        while await self._news.wait():
            wait = linger(True, self._credit.answer_s, len(self._started) + len(self._ended))
            if self._loop.time() - told <= 2 * wait:
                await asyncio.sleep(wait)
            told = self._loop.time()
            self._news.clear()
            started, self._started, ended, self._ended = self._started, [], self._ended, []
            if started:
                await self._write(started=work_pb2.Started(keys=keys_to_wire(started)))
            if ended:
                self._sent.update(dict.fromkeys(ended, told))
                await self._write(results=work_pb2.Results(groups=[_group(keys) for keys in keys_to_wire(ended)]))

    async def _write(self, **body: Any) -> None:
        self._fleet.messages += 1
        await self._call.write(work_pb2.WorkUp(**self._envelope, **body))


def _group(keys: common_pb2.AttemptKeys) -> work_pb2.ResultGroup:
    count = len(keys.seq)
    return work_pb2.ResultGroup(
        log=keys.log, seq=keys.seq, attempt=keys.attempt, length=[len(RESULT)] * count, data=RESULT * count,
        duration_ms=[1000] * count,
    )  # fmt: skip


if __name__ == "__main__":
    address, tls_dir, count, rows, least, most = sys.argv[1:]
    event_loop.run(main(Fleet(address, Path(tls_dir), int(rows), (float(least), float(most))), int(count)))

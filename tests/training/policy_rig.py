"""Reinforcement learning in this process: the trainer, the segment's rollouts, the engine and the rewards as they are,
with objects in a directory and child items that are run when somebody waits for them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from blake3 import blake3
from policy_tasks import Start, problems, write_prompts
from rollout.model.item import DEFAULT_SPEC, ItemSpec, Key, NewItem, Outcome
from rollout.workloads.json_form import JsonObject, canonical
from rollout.workloads.train.config import SECTIONS
from rollout.workloads.train.policy_config import GenerationSection, PolicySection
from rollout.workloads.train.prompts import Prompt, Prompts
from rollout_worker import scoring
from rollout_worker.backends.training import state
from rollout_worker.backends.training.exchange import ask_for_rollouts
from rollout_worker.backends.training.policy_trainer import PolicyTrainer
from rollout_worker.backends.training.prepare import read_tokenizer
from rollout_worker.backends.training.trainer import Job
from rollout_worker.executors.port import Attempt, Child, Context, Run
from rollout_worker.executors.rollout import RolloutExecutor
from rollout_worker.executors.train_rollouts import Rollouts, version_files, versions_of
from training_jobs import forget_accelerator

PARENT = b"p" * 32


@dataclass
class Place:
    """`Context` of an item: children are kept by ordinal, whoever spawns them again. `drawn`: how many were run."""

    directory: Path
    run_child: Callable[[NewItem, int, Place], Any]
    items: list[NewItem] = field(default_factory=list[NewItem])
    results: dict[int, Child] = field(default_factory=dict[int, Child])
    drawn: int = 0

    def progress(self, note: str, **figures: Any) -> None: ...

    def hindered(self, message: str, *, code: str = "") -> None: ...

    async def put_object(self, data: bytes | Path) -> bytes:
        content = data if isinstance(data, bytes) else data.read_bytes()
        name = blake3(content).digest()
        (self.directory / name.hex()).write_bytes(content)
        return name

    async def object_path(self, object_id: bytes) -> Path:
        return self.directory / object_id.hex()

    async def spawn(
        self, items: Sequence[NewItem], *, first_ordinal: int = 0, seal: bool = True, keeps: Sequence[bytes] = (),
        lets_go: Sequence[bytes] = (),
    ) -> None:  # fmt: skip
        for one in lets_go:
            (self.directory / one.hex()).unlink()
        for ordinal, item in enumerate(items, first_ordinal):
            if ordinal < len(self.items):
                assert self.items[ordinal].id == item.id, "a parent spawns the same children each time"
            else:
                assert ordinal == len(self.items)
                self.items.append(item)

    async def children(self, from_child: int = 0, *, holds_slot: bool = False) -> AsyncIterator[Child]:
        ordinal = from_child
        while ordinal < len(self.items):
            if ordinal not in self.results:
                self.drawn += 1
                data = await self.run_child(self.items[ordinal], ordinal, self)
                self.results[ordinal] = Child(ordinal, Outcome.DONE, data, None)
            yield self.results[ordinal]
            ordinal += 1


@dataclass
class PolicyRig:
    """A run of `kind` on a task of `policy_tasks`, in `directory`. `asked`: its rows. `place`: what the ledger has of its
    segment."""

    kind: str
    start: Start
    directory: Path
    settings: dict[str, Any]
    asked: Callable[..., list[dict[str, str]]] = problems

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        given = {"base_model": str(self.start.model), "dataset": "prompts.jsonl", "device": "cpu", "max_length": 64}
        section = SECTIONS[cast(Any, self.kind)].model_validate(given | {"minibatch_size": 64} | self.settings)
        assert isinstance(section, PolicySection)
        self.section = section
        self.prompts = self._prompts("prompts", self.asked(512, seed=section.seed))
        self.loop = asyncio.new_event_loop()
        model = {"uri": str(self.start.model), "content_id": "base"}
        backend = GenerationSection(device="cpu").resolved(section).backend_table(section)
        drawing = {"model": model, "backend": backend, "groups_at_once": 1}
        self.config: JsonObject = {"run": {"max_worker_lost": 3}, "generation": {}, "model": model}
        self.run = Run("01J00000000000000000000000", "train", drawing, executor="rollout")
        self.engine = RolloutExecutor()
        self.place = self.new_place()
        self.loop.run_until_complete(self.engine.start(self.run, cast(Context, self.place)))

    def new_place(self) -> Place:
        return Place(self.directory, self._child)

    def _prompts(self, name: str, rows: Sequence[Mapping[str, str]]) -> Path:
        write_prompts(self.directory / f"{name}.jsonl", cast(Any, rows))
        tokens = read_tokenizer(str(self.start.model))
        path = self.directory / f"{name}.prompts"
        Prompts.save(
            (
                Prompt(number, tokens(row["prompt"])["input_ids"], row["prompt"], {"answer": row["answer"]})
                for number, row in enumerate(rows, 1)
            ),
            path,
        )
        return path

    async def _child(self, item: NewItem, ordinal: int, place: Place) -> bytes:
        payload = cast(bytes, item.payload)
        if item.spec.executor == "map":
            found = scoring.answer(json.loads(payload))
            return canonical(await found if isinstance(found, Awaitable) else found)
        attempt = Attempt(Key(2, ordinal), 1, item.id, payload, DEFAULT_SPEC, self.run)
        own = Place(place.directory, self._child)
        return (await self.engine.run(attempt, cast(Context, own))).data

    def trainer(self) -> PolicyTrainer:
        """At step 0."""
        forget_accelerator()
        tokenizer = read_tokenizer(str(self.start.model))
        job = Job(
            cast(Any, self.kind), self.section, self.prompts, str(self.start.model), tokenizer.pad_token_id,
        )  # fmt: skip
        return ask_for_rollouts(self, job, self.section, "float32")

    def ask(self, **question: Any) -> dict[str, Any]:
        return self.loop.run_until_complete(self.rollouts.serve(question["wants"]))

    def steps(
        self, trainer: PolicyTrainer, first: int, steps: int, counts: JsonObject | None = None
    ) -> Iterator[dict[str, Any]]:
        """A segment, whose children are in `self.place`. `counts`: that the segment before left."""
        scratch = self.directory / f"rollouts-{first}"
        scratch.mkdir(exist_ok=True)
        attempt = Attempt(Key(1, 1), 1, PARENT + first.to_bytes(4, "big"), b"", ItemSpec(), self.run)
        versions = versions_of(counts or {})
        self.rollouts = Rollouts(
            self.config, self.section, attempt, cast(Context, self.place), Prompts(self.prompts), None, scratch,
            end=first + steps, versions=versions,
        )  # fmt: skip
        self.rollouts.samples.unlink(missing_ok=True)
        files = self.loop.run_until_complete(version_files(versions, cast(Context, self.place)))
        trainer.begin(scratch, files)
        for metrics in trainer.run(first, steps):
            self.rollouts.scored(metrics, cast(Any, trainer.told()["scored"]))
            yield {key: value for key, value in metrics.items() if not key.startswith("seconds")}

    def state(self, trainer: PolicyTrainer, name: str) -> Path:
        captured = trainer.capture({"format": 1, "kind": "train_state"})
        assert captured is not None
        state.write(captured, self.directory / name)
        return self.directory / name

    def close(self) -> None:
        self.loop.run_until_complete(self.engine.close())
        self.loop.close()

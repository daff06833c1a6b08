"""What runs on a worker: one text."""

import asyncio
import json

from rollout.model.errors import AttemptError
from rollout_worker.executors.port import Attempt, Context, Done, Run


class CountExecutor:
    placement = "slot"
    concurrency = 1

    @classmethod
    def engine_key(cls, run: Run) -> str:
        return "count"

    @classmethod
    def environment(cls, run: Run) -> dict[str, str]:
        return {}

    async def start(self, run: Run, context: Context) -> None: ...

    async def run(self, attempt: Attempt, context: Context) -> Done:
        count = attempt.run.config["count"]
        await asyncio.sleep(count["delay_ms"] / 1000)
        text = json.loads(attempt.payload)["text"]
        if not text.strip():
            raise AttemptError("there are no words", code="no_words", retry=False)
        return Done(json.dumps({"words": len(text.split(count["separator"]))}).encode(), units_out=len(text))

    async def close(self) -> None: ...

"""Environments that answer the policy turn by turn, and rewards of it.

A class of the user's, such as

    class Guess:
        def reset(self, prompt, low, high, **columns):     # the row's columns by name; prompt as in the row
            self.number = random.randint(low, high)
            return None                                    # or text, which is appended to the prompt

        def step(self, completion):                        # the text of one turn of the policy
            if completion.strip() == str(self.number):
                return "", 1.0, True                       # observation, reward or None, done
            return "wrong, try again", None, False

        def reward(self):                                  # optional: at the end, added to the rewards of the turns
            return None

An observation is text, or a list of messages where the prompt is one; text is a message of the user then. `step` may
also return an object with these three as attributes. Methods may be `async def`, and `close` is called at the end.

Between two turns nothing lives but text: for each turn an environment is made anew, reset, and given all completions
again, on any worker. So it must do the same when the same is said to it; if it does not, that is a fault. Python's
`random` is seeded before `reset`, alike for all samples of a group, and after it for each sample; what has its own
generator takes its seed from there.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import random
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from typing import Any, cast

from rollout_worker.rewards import RewardError, load, number, raised, shown


async def play(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return for each sample what its environment says after its last completion.

    `row` is a `Play` (rollout.workloads.train.rollouts). Raises RewardError, which names the environment, its method,
    the sample and the turn.
    """
    target = str(row["environment"])
    make = load(target, "environment", made=False)
    if not callable(make):
        raise RewardError(f"environment {target} is {shown(make)}, and neither a class nor a function that makes one")
    found: list[dict[str, Any]] = []
    for place, history in enumerate(row["histories"]):
        one = _Playing(f"environment {target}", make, isinstance(row["prompt"], list))
        seeds = (row["seed"], row["seeds"][place])
        try:
            prompt, columns = deepcopy((row["prompt"], row["columns"]))  # an environment may change what it gets
            found.append(await one.play(prompt, columns, history, row["over"][place], seeds, row["trails"][place]))
        except RewardError as error:
            where = RewardError(f"{error} (sample {place + 1}, turn {one.turn})", retry=error.retry)
            raise where.with_traceback(error.__traceback__) from None
    return found


class _Playing:
    """One environment, played from its start."""

    def __init__(self, name: str, make: Callable[[], Any], chat: bool) -> None:
        self._name = name
        self._make = make
        self._chat = chat
        self.turn = 0
        self._said = hashlib.sha256()

    async def play(
        self,
        prompt: Any,
        columns: dict[str, Any],
        history: list[str],
        over: bool,
        seeds: tuple[int, int],
        trail: str,
    ) -> dict[str, Any]:
        random.seed(seeds[0])
        environment = await self._call("it", self._make)
        try:
            said = await self._call("reset", environment.reset, prompt=prompt, **columns)
            if said is not None and not isinstance(said, str):
                raise RewardError(f"{self._name}: reset returned {shown(said)}, and not text or None")
            now = self._trail(trail, said)
            random.seed(seeds[1])
            observation, total, done = cast(Any, said), cast("float | None", None), False
            for self.turn, completion in enumerate(history, 1):
                if done:
                    raise RewardError(f"{self._name}: it is done sooner than when the same was said to it before")
                observation, reward, done = self._step(await self._call("step", environment.step, completion))
                total = _sum(total, reward)
                now = self._trail(trail, observation, reward, done)
            if (done or over) and hasattr(environment, "reward"):
                last = await self._call("reward", environment.reward)
                total = _sum(total, number(f"{self._name}: reward", last))
        finally:
            if hasattr(environment, "close"):
                await self._call("close", environment.close)
        return {"observation": observation, "reward": total, "done": done, "trail": now}

    def _trail(self, before: str, *said: Any) -> str:
        """Return the trail including this turn. Raises RewardError if it differs from `before`, when the same input was
        given."""
        self._said.update(json.dumps(said, default=str).encode())
        found = f"{self.turn} {self._said.hexdigest()}"
        if before.startswith(f"{self.turn} ") and before != found:
            raise RewardError(
                f"{self._name}: it says something else than when the same was said to it before: what it draws must "
                "come from Python's random, or from a generator that is seeded from there"
            )
        return found

    async def _call(self, name: str, method: Callable[..., Any], *given: Any, **named: Any) -> Any:
        try:
            return await _awaited(method(*given, **named))
        except (MemoryError, RewardError):
            raise
        except Exception as error:  # noqa: BLE001 - the user's method
            raise raised(f"{self._name}: {name}", error) from None

    def _step(self, found: Any) -> tuple[Any, float | None, bool]:
        parts: tuple[Any, ...] = tuple(found) if issubclass(type(found), tuple) else ()
        if not parts and hasattr(found, "observation") and hasattr(found, "done"):
            parts = (found.observation, getattr(found, "reward", None), found.done)
        if len(parts) != 3:
            raise RewardError(f"{self._name}: step returned {shown(found)}, and not (observation, reward, done)")
        observation, reward, done = parts
        if type(done).__name__ not in ("bool", "bool_"):  # numpy's too
            raise RewardError(f"{self._name}: step returned {shown(done)} as done, and not True or False")
        if observation is None and not done:
            raise RewardError(f"{self._name}: step returned no observation, and the environment is not done")
        if not (observation is None or isinstance(observation, str) or (self._chat and _is_messages(observation))):
            shape = "text or a list of messages" if self._chat else "text, as the prompt is"
            raise RewardError(f"{self._name}: step returned {shown(observation)} as observation, and not {shape}")
        return observation, number(f"{self._name}: the reward of step", reward), bool(done)


def _is_messages(value: Any) -> bool:
    listed = cast("list[Any]", value) if isinstance(value, list) else []
    given = [cast("dict[str, Any]", one) for one in listed if isinstance(one, dict)]
    return bool(given) and len(given) == len(listed) and all(isinstance(one.get("role"), str) for one in given)


def _sum(total: float | None, more: float | None) -> float | None:
    return total if more is None else more if total is None else total + more


# ---- what others call environments


def openenv(
    make: Callable[[], Any], action: Callable[[str], Any], observation: Callable[[Any], str] = str
) -> Callable[[], Any]:
    """Return a class for clients of OpenEnv.

    Example: `Env = openenv(lambda: EchoEnv(base_url=URL), lambda text: EchoAction(message=text), lambda seen:
    seen.echoed_message)`. A column `seed` is passed to its `reset`.
    """

    class OpenEnv:
        def __init__(self) -> None:
            self._client = make()

        async def reset(self, prompt: Any, **columns: Any) -> str:
            given = {"seed": columns["seed"]} if columns.get("seed") is not None else {}
            return observation((await _awaited(self._client.reset(**given))).observation)

        async def step(self, completion: str) -> tuple[str, Any, bool]:
            found = await _awaited(self._client.step(action(completion)))
            return observation(found.observation), found.reward, found.done

        async def close(self) -> None:
            await _awaited(self._client.close())

    return OpenEnv


def reasoning_gym(dataset: Any, answer: Callable[[str], str | None] = str.strip) -> Callable[[], Any]:
    """Return a class for tasks of reasoning-gym: `Env = reasoning_gym("chain_sum")`.

    `dataset` is a dataset or its name. Rows have an entry's `answer` and `metadata` beside the prompt. `answer`
    extracts the answer from a completion. There is one turn.
    """

    class ReasoningGym:
        def __init__(self) -> None:
            self._score = dataset.score_answer if hasattr(dataset, "score_answer") else _score_of(dataset)

        def reset(self, prompt: Any, **columns: Any) -> None:
            self._entry = {"question": prompt, **columns}

        def step(self, completion: str) -> tuple[str, Any, bool]:
            return "", self._score(answer(completion), self._entry), True

    return ReasoningGym


def _score_of(name: str) -> Callable[..., Any]:
    library: Any = importlib.import_module("reasoning_gym")
    return library.get_score_answer_fn(name)


def verifiers(make: Callable[[], Any]) -> Callable[[], Any]:
    """Return a class for multi-turn environments of verifiers 0.1 (from 0.1.9; 0.4 differs): `Env =
    verifiers(load_environment)`.

    Prompts are messages, rows have its columns (`answer`, `info`, `task`), and the rubric's reward comes at the end.
    """

    class Verifiers:
        def __init__(self) -> None:
            self._environment = make()
            self._messages: list[Any] = []

        async def reset(self, prompt: Any, **columns: Any) -> None:
            self._messages = list(prompt)
            row = {"example_id": 0, **columns, "prompt": prompt}
            state = await self._environment.init_state(row, None, "", None)
            self._state = await self._environment.setup_state(state)

        async def step(self, completion: str) -> tuple[Any, None, bool]:
            environment, state, said = self._environment, self._state, {"role": "assistant", "content": completion}
            state["trajectory"].append(
                {
                    "prompt": self._messages, "completion": [said], "response": None, "tokens": None, "reward": None,
                    "advantage": None, "is_truncated": False, "trajectory_id": "", "extras": {},
                }
            )  # fmt: skip
            known = len(self._messages) + 1
            if await environment.is_completed(state):
                return None, None, True
            self._messages = list(await environment.get_prompt_messages(state))
            done = await environment.is_completed(state)
            return [_plain(one) for one in self._messages[known:]], None, done

        async def reward(self) -> Any:
            await self._environment.render_completion(self._state)
            judge = self._environment.rubric.score_rollout
            one_at_a_time = "score_sem" in inspect.signature(judge).parameters  # before 0.1.10
            await judge(self._state, **({"score_sem": nullcontext()} if one_at_a_time else {}))
            return self._state["reward"]

    return Verifiers


def _plain(message: Any) -> Any:
    return message.model_dump(mode="json", exclude_none=True) if hasattr(message, "model_dump") else message


async def _awaited(found: Any) -> Any:
    return await found if inspect.isawaitable(found) else found

"""What the child items of a step of reinforcement learning say, and what their results are.

A *group* is one prompt with several samples, drawn by one version of the policy: a child of the segment, of the
executor `rollout`. Where rewards are code, it has a child of its own, of the executor `map`, which scores its samples.
With an environment it has one more for each turn, which plays the environment of every sample from its beginning.

With a job task as environment it has one for each sample, a *trial* of the executor `job`, and that one for each turn:
an `Ask` of the executor `rollout` again, whose result is an `Answer`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, cast

from rollout.model.errors import InputError
from rollout.workloads.json_form import JsonObject, canonical, field_in, invalid_result, object_in, parse_result

ROLLOUT = "rollout"
"""The executor of groups."""
SCORE = "rollout_worker.scoring:answer"
"""The function of the `map` items that score groups and play environments."""
ENVIRONMENT = "environment"
"""The name of the reward that an environment gives."""
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Weights:
    """A version of the policy. `manifest`: hex of the object that lists its tensors, `WeightsManifest`. `digest`: of
    names and tensors, wherever they are stored."""

    version: int
    manifest: str
    digest: str = ""


@dataclass(frozen=True, slots=True)
class WeightsManifest:
    """Which object holds which tensor of a version: all that training changes, also those that this version did not.

    `tensors`: name in the model's files -> (hex of a safetensors object that has it, blake3 of its bytes in hex).
    """

    version: int
    tensors: dict[str, tuple[str, str]]

    @property
    def hashes(self) -> dict[str, str]:
        return {name: digest for name, (_, digest) in self.tensors.items()}

    @property
    def files(self) -> list[str]:
        """Objects that have its tensors, each once."""
        return list(dict.fromkeys(file for file, _ in self.tensors.values()))

    def followed_by(
        self, version: int, hashes: Mapping[str, str], written: Sequence[str], file: str
    ) -> WeightsManifest:
        """The version after this one. `hashes`: of all tensors; `written`: those that the object `file` (hex) has."""
        places = {name: place for name, (place, _) in self.tensors.items()} | dict.fromkeys(written, file)
        return WeightsManifest(version, {name: (places[name], digest) for name, digest in hashes.items()})

    def encode(self) -> bytes:
        return canonical(asdict(self))

    @staticmethod
    def decode(data: bytes) -> WeightsManifest:
        """InputError: this is none."""
        try:
            found = json.loads(data)
            tensors = {str(name): (str(place[0]), str(place[1])) for name, place in found["tensors"].items()}
            return WeightsManifest(int(found["version"]), tensors)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise InputError(f"this is no manifest of weights: {error}") from error


@dataclass(frozen=True, slots=True)
class Scoring:
    """The row of an item of `map` that scores a group. `functions`: PKG.MODULE:FUNCTION of each, in order. `prompt`: as
    the row of the data has it, text or messages. `completions`: text, or the messages of a conversation's turns.
    `columns`: the other keys of that row. `load_only`: nothing is called, and whatever keeps a function from being
    imported is told. `tag`: comes back with the result."""

    functions: list[str]
    prompt: Any = None
    completions: list[Any] = field(default_factory=list[Any])
    completion_ids: list[list[int]] = field(default_factory=list[list[int]])
    columns: JsonObject = field(default_factory=JsonObject)
    step: int = 0
    load_only: bool = False
    tag: str = ""

    def encode(self) -> bytes:
        return canonical(asdict(self))


@dataclass(frozen=True, slots=True)
class Episode:
    """`target`: PKG.MODULE:CLASS of the environment. `max_turns`: of a sample. `max_prompt`: tokens of the prompt with
    what the environment's beginning adds to it, at most; 0: any."""

    target: str
    max_turns: int
    max_prompt: int = 0


@dataclass(frozen=True, slots=True)
class Play:
    """The row of an item of `map` that plays the environments of a group's samples, each from its beginning.

    `histories`: of each sample the completions so far, oldest first; one that is empty asks for what `reset` says.
    `over`: there is no turn after the last of these. `seed`, `seeds`: of the group, and one of each history: those of
    Python's `random`. The result, by sample: {"observation": text, messages or None, "reward", "done", "trail"}.
    `trails`: of each history the trail of an answer before, if there was one: "TURNS HASH" of all that was said in so
    many turns, which must be the same this time.
    """

    environment: str
    prompt: Any
    columns: JsonObject
    histories: list[list[str]]
    over: list[bool]
    seed: int
    seeds: list[int]
    trails: list[str]
    tag: str = ""

    def encode(self) -> bytes:
        return canonical(asdict(self))


@dataclass(frozen=True, slots=True)
class TaskPlay:
    """Of a group whose samples are trials. `spec`: of a trial, as `rollout.workloads.job.trial` has it, but for what is
    the sample's own. `max_turns`: of a conversation. `max_prompt`: tokens of its beginning. `temperature`: that
    requests of the agent may name."""

    spec: JsonObject
    max_turns: int
    max_prompt: int
    temperature: float


@dataclass(frozen=True, slots=True)
class TrialPolicy:
    """Who answers the agent of a trial, and within which limits. `temperature`: what is drawn with; `named`: what
    requests may name. `max_tokens`: of the sample, all turns together. `labels`: of workers that may draw."""

    weights: Weights
    seed: int
    temperature: float
    named: float
    max_tokens: int
    max_prompt: int
    max_turns: int
    stop: list[int]
    labels: list[tuple[str, str]]
    max_worker_lost: int

    @staticmethod
    def of(fields: JsonObject) -> TrialPolicy:
        """InputError: these are none."""
        try:
            labels = [(str(name), str(value)) for name, value in fields["labels"]]
            made: JsonObject = {"weights": Weights(**fields["weights"]), "labels": labels}
            return TrialPolicy(**(fields | made))
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"this is no policy of a trial: {error}") from error


@dataclass(frozen=True, slots=True)
class Ask:
    """A turn of a conversation that an agent has: what comes behind `so_far`, token ids of which the first `first` are
    those that it began with. `said`: so many of `messages` stand for `so_far`, the policy's own last; 0: it begins.
    `max_tokens`, `stop`: texts, as the request names them. `tag`: comes back with the result."""

    policy: TrialPolicy
    messages: list[JsonObject]
    seed: int
    so_far: list[int] = field(default_factory=list[int])
    first: int = 0
    said: int = 0
    max_tokens: int | None = None
    stop: list[str] = field(default_factory=list[str])
    tag: str = ""

    def encode(self) -> bytes:
        return canonical({"ask": asdict(self)})


@dataclass(frozen=True, slots=True)
class Answer:
    """`prompt`: ids that were put behind those so far; `ids`, `logprobs`, `text`: what was drawn then. `cut`: there was
    no room for more. `fault`: why nothing was drawn, of the types of errors that trials have."""

    tag: str
    prompt: list[int] = field(default_factory=list[int])
    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    text: str = ""
    finish_reason: FinishReason = "stop"
    cut: bool = False
    fault: tuple[str, str] | None = None

    def encode(self) -> bytes:
        return canonical(asdict(self))

    @staticmethod
    def decode(data: bytes) -> Answer:
        """InputError: this is none."""
        try:
            fields = json.loads(data)
            return Answer(**(fields | {"fault": tuple(fields["fault"]) if fields["fault"] else None}))
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"this is no answer of a policy: {error}") from error


@dataclass(frozen=True, slots=True)
class Group:
    """The payload of an item of `rollout`. `prompt`: token ids. `seeds`: one of each sample.

    `temperature` divides the logits, and the log-probabilities of the result are those of the divided ones.
    `stop`: token ids that end a sample, beside the model's own. `scoring`: what scores the samples, but for what the
    samples are; None: nothing does here. `scoring_s`: seconds that it may take, and each turn of the environment.
    `environment`: what answers the samples; `trial`: each is drawn in a trial; both None: each has one turn.
    """

    step: int
    index: int
    prompt: list[int]
    seeds: list[int]
    max_tokens: int
    weights: Weights
    temperature: float = 1.0
    stop: list[int] = field(default_factory=list[int])
    scoring: Scoring | None = None
    scoring_s: float = 300.0
    environment: Episode | None = None
    trial: TaskPlay | None = None

    def identity(self) -> bytes:
        """What its samples depend on: not where the weights are stored."""
        fields = asdict(self)
        return canonical(fields | {"weights": [self.weights.version, self.weights.digest]})

    def encode(self) -> bytes:
        return canonical(asdict(self))

    @staticmethod
    def decode(data: bytes) -> Group:
        """InputError: this is none."""
        try:
            fields = json.loads(data)
            scoring = Scoring(**fields["scoring"]) if fields.get("scoring") else None
            environment = Episode(**fields["environment"]) if fields.get("environment") else None
            trial = TaskPlay(**fields["trial"]) if fields.get("trial") else None
            made = {"weights": Weights(**fields["weights"]), "scoring": scoring}
            return Group(**(fields | made | {"environment": environment, "trial": trial}))
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"this is no group of rollouts: {error}") from error


@dataclass(slots=True)
class Sample:
    """`ids`: of the completion, with the end-of-sequence token if one was drawn. `logprobs`: the engine's, one of each
    id. `learnt`: 1 where the policy drew the token, 0 where an environment did; empty: the policy drew all of them.
    `versions`: (version, tokens) of each span, in order. `text`: of `ids` without special tokens. `prompt`: ids that it
    began with, where they are its own; else empty."""

    ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    seed: int
    text: str
    versions: list[list[int]]
    learnt: list[int] = field(default_factory=list[int])
    prompt: list[int] = field(default_factory=list[int])


@dataclass(slots=True)
class GroupResult:
    """`rewards`: by function, by sample; None: that function does not judge that sample; the environment's come last.
    `fault`: why there are none, or why some are 0, {"code", "message"}. `again`: an attempt before failed or was lost.
    `prompt`: token ids, where the environment has added to the group's; else empty. `device`: that drew them, cpu or
    cuda."""

    samples: list[Sample]
    rewards: list[list[float | None]] = field(default_factory=list[list[float | None]])
    fault: JsonObject = field(default_factory=JsonObject)
    again: bool = False
    prompt: list[int] = field(default_factory=list[int])
    device: str = ""

    def encode(self) -> bytes:
        return canonical(asdict(self))

    @staticmethod
    def decode(data: bytes, functions: int = 0) -> GroupResult:
        """InvalidResultError: this is none, with rewards by so many functions."""
        found = object_in(parse_result(data), "it")
        samples = [sample_of(object_in(one, "a sample")) for one in field_in(found, "samples", list)]
        fault = field_in(found, "fault", dict)
        rewards = scores_of(found.get("rewards"), 0 if fault and not found["rewards"] else functions, len(samples))
        again, prompt = field_in(found, "again", bool), field_in(found, "prompt", list)
        return GroupResult(samples, rewards, fault, again, prompt, field_in(found, "device", str))


_SAMPLE: dict[str, tuple[type, ...]] = {
    "ids": (list,), "logprobs": (list,), "finish_reason": (str,), "seed": (int,), "text": (str,),
    "versions": (list,), "learnt": (list,), "prompt": (list,),
}  # fmt: skip


def sample_of(fields: JsonObject) -> Sample:
    """InvalidResultError: these are none of a sample's."""
    for name, types in _SAMPLE.items():
        field_in(fields, name, *types)
    sample = Sample(**fields)
    if len(sample.ids) != len(sample.logprobs) or len(sample.learnt) not in (0, len(sample.ids)):
        raise invalid_result("a sample has other counts of ids, logprobs and learnt")
    if sample.finish_reason not in ("stop", "length"):
        raise invalid_result("finish_reason is neither stop nor length")
    return sample


def decode_item(data: bytes) -> Group | Ask:
    """The payload of an item of `rollout`. InputError: it is none."""
    try:
        found = json.loads(data)
        ask = found.get("ask")
        if ask is None:
            return Group.decode(data)
        return Ask(**(ask | {"policy": TrialPolicy.of(ask["policy"])}))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"this is no item of rollouts: {error}") from error


def scores_of(found: Any, functions: int, samples: int) -> list[list[float | None]]:
    """By function, by sample. InvalidResultError: `found` is no such table."""
    wrong = invalid_result(f"rewards are no {functions} lists of {samples} numbers")
    if type(found) is not list or len(cast("list[Any]", found)) != functions:
        raise wrong
    for one in cast("list[Any]", found):
        if type(one) is not list or len(cast("list[Any]", one)) != samples:
            raise wrong
        if not all(value is None or type(value) in (int, float) for value in cast("list[Any]", one)):
            raise wrong
    return cast("list[list[float | None]]", found)

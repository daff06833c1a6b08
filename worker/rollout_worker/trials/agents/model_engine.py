"""A model on engines of this cluster that the commands of a trial query at `policy_address`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout_worker.trials.agents.cluster_engine import ClusterEngine
from rollout_worker.trials.agents.policy_engine import CONTEXT
from rollout_worker.trials.port import Reply, TrialFault

_OF_SERVICES = frozenset({"model", "user", "metadata", "store", "stream_options", "service_tier"})
"""Keys of a request that mean nothing to an engine."""
_BY_REQUEST = frozenset({"api_bad_request", CONTEXT})
"""Types of faults that the request caused."""


class ModelEngine:
    """The model of one try at one trial. `broken` is the first fault that the request did not cause; the trial ends
    with it."""

    def __init__(self, engine: ClusterEngine) -> None:
        self._engine = engine
        self.broken: TrialFault | None = None

    async def ask(self, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> Reply:
        """Return an answer. `sampling` has keys of a request to an OpenAI-compatible service. Raises TrialFault."""
        given = {
            key: value for key, value in sampling.items() if key not in _OF_SERVICES and value not in (None, [], {})
        }
        if "max_completion_tokens" in given:
            given["max_tokens"] = given.pop("max_completion_tokens")
        if isinstance(given.get("stop"), str):
            given["stop"] = [given["stop"]]
        try:
            return await self._engine.ask(messages, **given)
        except TrialFault as fault:
            if fault.type not in _BY_REQUEST:
                self.broken = self.broken or fault
            raise

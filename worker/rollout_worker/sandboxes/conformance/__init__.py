"""The suite that every provider of sandboxes must pass, for authors to run against theirs.

    python -m rollout_worker.sandboxes.conformance bubblewrap --state /tmp/sandboxes
    python -m rollout_worker.sandboxes.conformance my_package:open_provider --state /tmp/sandboxes --json

or, in pytest:

    @pytest.mark.parametrize("case", conformance.CASES, ids=lambda case: case.name)
    async def test_conformance(case, bench):  # a fixture that yields a Bench
        try:
            await case.run(bench)
        except conformance.NotApplicableError as error:
            pytest.skip(str(error))

A case that needs what the provider says it cannot do is not applicable; what it says it can do is tested.
"""

from rollout_worker.sandboxes.conformance import commands, deadlines, files, isolation, life, limits
from rollout_worker.sandboxes.conformance.running import PROVIDERS, Outcome, run
from rollout_worker.sandboxes.conformance.suite import (
    CASES,
    Bench,
    Case,
    NotApplicableError,
    NotConformingError,
    engine_bench,
    local_bench,
)

__all__ = [
    "CASES",
    "PROVIDERS",
    "Bench",
    "Case",
    "NotApplicableError",
    "NotConformingError",
    "Outcome",
    "commands",
    "deadlines",
    "engine_bench",
    "files",
    "isolation",
    "life",
    "limits",
    "local_bench",
    "run",
]

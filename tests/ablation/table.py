"""The table of safeguards, by area."""

from __future__ import annotations

import safeguards_access
import safeguards_children
import safeguards_client
import safeguards_commit
import safeguards_dispatch
import safeguards_exclusive
import safeguards_lease
import safeguards_objects
import safeguards_results
import safeguards_steal
import safeguards_stores
import safeguards_worker
from safeguard import Safeguard

AREAS: dict[str, tuple[Safeguard, ...]] = {
    "Lease, epochs, what leaves a coordinator": safeguards_lease.SAFEGUARDS,
    "Results, sessions, liveness": safeguards_results.SAFEGUARDS,
    "Dispatch, chains, the window": safeguards_dispatch.SAFEGUARDS,
    "Exclusive items": safeguards_exclusive.SAFEGUARDS,
    "Steals": safeguards_steal.SAFEGUARDS,
    "Submitting, the cursor, policies, replay": safeguards_commit.SAFEGUARDS,
    "Children and their parents": safeguards_children.SAFEGUARDS,
    "The worker": safeguards_worker.SAFEGUARDS,
    "Objects and the cache of a host": safeguards_objects.SAFEGUARDS,
    "The ledger, storage, queues": safeguards_stores.SAFEGUARDS,
    "Identities, limits, plugins": safeguards_access.SAFEGUARDS,
    "The client and its files": safeguards_client.SAFEGUARDS,
}
ALL: tuple[Safeguard, ...] = tuple(one for area in AREAS.values() for one in area)
BY_NAME = {one.name: one for one in ALL}

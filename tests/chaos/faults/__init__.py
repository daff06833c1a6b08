"""The faults: whom each strikes, how, for how long, and what proves that it took effect. One module per target."""

from __future__ import annotations

from chaos.faults.bucket import CutBucket, ResetBucket, SlowBucket
from chaos.faults.client import KillClient
from chaos.faults.coordinator import CutCoordinator, KillLeader, KillStandby, StopCoordinator, StopLeader
from chaos.faults.database import CutDatabase, KillDatabase
from chaos.faults.fault import Fault
from chaos.faults.links import Reset, Slow
from chaos.faults.worker import CutWorker, CutWorkerOneWay, CutWorkerSomehow, KillWorker, StopWorker

__all__ = ["KINDS"]
KINDS: dict[str, dict[str, type[Fault]]] = {
    "sqlite": {
        "coordinator killed": KillLeader,
        "coordinator stopped": StopCoordinator,
        "coordinator cut off": CutCoordinator,
        "worker killed": KillWorker,
        "worker stopped": StopWorker,
        "worker cut off": CutWorker,
        "worker cut off one way": CutWorkerOneWay,
        "slow links": Slow,
        "connections reset": Reset,
        "client killed": KillClient,
    },
    "postgres": {
        "leader killed": KillLeader,
        "leader stopped": StopLeader,
        "standby killed": KillStandby,
        "database killed": KillDatabase,
        "leader cut from database": CutDatabase,
        "leader cut off": CutCoordinator,
        "worker killed": KillWorker,
        "worker stopped": StopWorker,
        "worker cut off": CutWorkerSomehow,
        "slow links": Slow,
        "client killed": KillClient,
    },
}
KINDS["cloud"] = KINDS["postgres"] | {
    "bucket cut off": CutBucket,
    "slow bucket": SlowBucket,
    "bucket's connections reset": ResetBucket,
}

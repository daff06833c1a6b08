"""The algorithm of a configuration."""

from __future__ import annotations

from rollout.workloads.train.config import DpoSection, IpoSection, Kind, KtoSection, RmSection, TrainingSection

from rollout_worker.algorithms.dpo import DirectPreference
from rollout_worker.algorithms.ipo import IdentityPreference
from rollout_worker.algorithms.kto import KahnemanTversky
from rollout_worker.algorithms.port import Algorithm
from rollout_worker.algorithms.rm import RewardModel
from rollout_worker.algorithms.sft import SupervisedFineTuning


def make_algorithm(kind: Kind, settings: TrainingSection) -> Algorithm:
    match settings:
        case DpoSection():
            return DirectPreference(settings.beta, settings.label_smoothing, settings.loss_type)
        case IpoSection():
            return IdentityPreference(settings.beta)
        case KtoSection():
            return KahnemanTversky(settings.beta, settings.desirable_weight, settings.undesirable_weight)
        case RmSection():
            return RewardModel(settings.head.kind, settings.head.scale, settings.centre)
        case _:
            return SupervisedFineTuning()

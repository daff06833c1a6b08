"""Finds the algorithm of a configuration."""

from __future__ import annotations

from rollout.workloads.train.config import DpoSection, IpoSection, Kind, KtoSection, RmSection, TrainingSection
from rollout.workloads.train.policy_config import GrpoSection, PolicySection, PpoSection

from rollout_worker.algorithms.dpo import DirectPreference
from rollout_worker.algorithms.grpo import GroupRelative
from rollout_worker.algorithms.ipo import IdentityPreference
from rollout_worker.algorithms.kto import KahnemanTversky
from rollout_worker.algorithms.policy_port import PolicyAlgorithm
from rollout_worker.algorithms.port import Algorithm
from rollout_worker.algorithms.ppo import Proximal
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


def make_policy_algorithm(settings: PolicySection) -> PolicyAlgorithm:
    """Make the algorithm for settings in which the correction for the engine is resolved; None is off."""
    correction, cap = settings.importance_sampling_correction or "off", settings.importance_sampling_cap
    match settings:
        case GrpoSection():
            return GroupRelative(
                loss_type=settings.loss_type,
                importance_sampling_level=settings.importance_sampling_level,
                epsilon=settings.epsilon,
                epsilon_high=settings.epsilon_high,
                delta=settings.delta,
                beta=settings.beta,
                max_completion_length=settings.max_completion_length,
                importance_sampling_correction=correction,
                importance_sampling_cap=cap,
            )
        case PpoSection():
            return Proximal(
                epsilon=settings.epsilon,
                cliprange_value=settings.cliprange_value,
                vf_coef=settings.vf_coef,
                importance_sampling_correction=correction,
                importance_sampling_cap=cap,
            )
        case _:
            raise TypeError(f"{type(settings).__name__} has no algorithm")

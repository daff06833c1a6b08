"""Why trials fail: one table with every type of error, its phase and its consequences.

Errors that an agent or its work can cause give a valid reward, 0 if there is no other: otherwise an agent could leave
the denominator by breaking its sandbox or its verifier. Only errors that an agent cannot cause are left out of the
scores. If both could cause a fault, the facts decide its type: a sandbox that someone ended is `environment_lost`, and
one that ended because of what ran in it is `agent_execution_failed`.

A job can change the consequences (`override_error_policy`). A type that is not in the table is treated as a fault of
the infrastructure: it is retried and never counted as a score.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from rollout.config.section import Section

Phase = Literal["check", "setup", "install", "execute", "verify", "teardown", "any"]
Blame = Literal["infrastructure", "api", "agent", "verifier", "job"]
"""Who is at fault. With the first two, a trial says nothing about the agent and counts in the infrastructure's rate."""


@dataclass(frozen=True, slots=True)
class ErrorPolicy:
    """`retried`: the trial is tried again. `graded`: the verifier runs nevertheless, if the phase comes before it.
    `valid_reward`: the trial's reward is the agent's score, or 0 if the verifier did not run."""

    phase: Phase
    blame: Blame
    retried: bool
    graded: bool
    valid_reward: bool


INTERNAL_ERROR = "internal_error"
VERIFIER_NOT_RUNNABLE = "verifier_not_runnable"
"""Experiments only: the grader's command is missing or not a program."""
UNKNOWN = ErrorPolicy("any", "infrastructure", retried=True, graded=False, valid_reward=False)


def _row(phase: Phase, blame: Blame, flags: str) -> ErrorPolicy:
    """Make a row. `flags` has a letter each for retried, graded, valid reward."""
    retried, graded, valid = (flag == "y" for flag in flags)
    return ErrorPolicy(phase, blame, retried, graded, valid)


ERRORS: dict[str, ErrorPolicy] = {
    "task_invalid": _row("check", "job", "nnn"),
    "task_not_found": _row("check", "job", "nnn"),
    "environment_build_failed": _row("setup", "infrastructure", "ynn"),
    "environment_build_timeout": _row("setup", "infrastructure", "ynn"),
    "environment_image_pull_failed": _row("setup", "infrastructure", "ynn"),
    "environment_start_failed": _row("setup", "infrastructure", "ynn"),
    "environment_resource_allocation_failed": _row("setup", "infrastructure", "ynn"),
    "environment_healthcheck_failed": _row("setup", "infrastructure", "ynn"),
    "agent_install_failed": _row("install", "infrastructure", "ynn"),
    "agent_install_timeout": _row("install", "infrastructure", "ynn"),
    "agent_execution_failed": _row("execute", "agent", "nyy"),
    "agent_execution_timeout": _row("execute", "agent", "nyy"),
    "agent_context_window_exceeded": _row("execute", "agent", "nyy"),
    "agent_output_tokens_exceeded": _row("execute", "agent", "nyy"),
    "agent_refused": _row("execute", "agent", "nyy"),
    "agent_result_missing": _row("execute", "agent", "nyy"),
    "agent_result_invalid": _row("execute", "agent", "nyy"),
    "agent_authentication_failed": _row("execute", "job", "nnn"),
    "agent_model_not_found": _row("execute", "job", "nnn"),
    "api_rate_limited": _row("execute", "api", "yyn"),
    "api_overloaded": _row("execute", "api", "yyn"),
    "api_usage_limit": _row("execute", "api", "yyn"),
    "api_unreachable": _row("execute", "api", "yyn"),
    "api_bad_request": _row("execute", "job", "nyn"),
    "budget_exceeded": _row("execute", "job", "nyn"),
    "environment_out_of_memory": _row("execute", "agent", "nyy"),
    "evidence_storage_full": _row("any", "infrastructure", "ynn"),
    "environment_lost": _row("any", "infrastructure", "ynn"),
    "verifier_tests_copy_failed": _row("verify", "infrastructure", "ynn"),
    "verifier_failed": _row("verify", "verifier", "nyy"),
    "verifier_timeout": _row("verify", "verifier", "nyy"),
    "verifier_reward_missing": _row("verify", "verifier", "nyy"),
    "verifier_reward_invalid": _row("verify", "verifier", "nyy"),
    VERIFIER_NOT_RUNNABLE: _row("verify", "verifier", "nyy"),
    "environment_teardown_failed": _row("teardown", "infrastructure", "nyy"),
    "cancelled": _row("any", "job", "nnn"),
    INTERNAL_ERROR: UNKNOWN,
}

HARBOR_NAMES: dict[str, tuple[str, ...]] = {
    "AddTestsDirError": ("verifier_tests_copy_failed",),
    "AgentAuthenticationError": ("agent_authentication_failed",),
    "AgentSafetyRefusalError": ("agent_refused",),
    "AgentSetupTimeoutError": ("agent_install_timeout",),
    "AgentTimeoutError": ("agent_execution_timeout",),
    "ApiConnectionError": ("api_unreachable",),
    "ApiOverloadedError": ("api_overloaded",),
    "ApiRateLimitError": ("api_rate_limited",),
    "ApiUsageLimitError": ("api_usage_limit",),
    "BadRequestError": ("api_bad_request",),
    "BudgetExceededError": ("budget_exceeded",),
    "CancelledError": ("cancelled",),
    "ContextLengthExceededError": ("agent_context_window_exceeded",),
    "ContextWindowExceededError": ("agent_context_window_exceeded",),
    "EnvironmentStartTimeoutError": ("environment_start_failed",),
    "HealthcheckError": ("environment_healthcheck_failed",),
    "MemoryLimitExceededError": ("environment_out_of_memory",),
    "ModelNotFoundError": ("agent_model_not_found",),
    "NetworkConnectionError": ("api_unreachable",),
    "NonZeroAgentExitCodeError": ("agent_execution_failed",),
    "OutputLengthExceededError": ("agent_output_tokens_exceeded",),
    "OutputTokenExceededError": ("agent_output_tokens_exceeded",),
    "RateLimitError": ("api_rate_limited",),
    "RewardFileEmptyError": ("verifier_reward_invalid",),
    "RewardFileNotFoundError": ("verifier_reward_missing",),
    "SandboxBuildFailedError": ("environment_build_failed", "environment_build_timeout"),
    "SandboxLikelyOutOfMemoryError": ("environment_out_of_memory",),
    "VerifierOutputParseError": ("verifier_reward_invalid",),
    "VerifierTimeoutError": ("verifier_timeout",),
}
"""Exceptions that Harbor's job files name, with our types of the same meaning."""


def types_of(name: str) -> tuple[str, ...]:
    """Return the types that `name`, one of this table or Harbor's, stands for. Raises KeyError."""
    return (name,) if name in ERRORS else HARBOR_NAMES[name]


class PolicyOverride(Section):
    """Changes of a row by a job; None keeps the table's value."""

    should_retry: bool | None = None
    should_grade: bool | None = None
    has_valid_reward: bool | None = None


def policy_of(error_type: str, overrides: Mapping[str, PolicyOverride] | None = None) -> ErrorPolicy:
    """Return the row of `error_type` with the job's overrides."""
    policy = ERRORS.get(error_type, UNKNOWN)
    override = (overrides or {}).get(error_type)
    if override is None:
        return policy
    changes = {
        "retried": override.should_retry,
        "graded": override.should_grade,
        "valid_reward": override.has_valid_reward,
    }
    return replace(policy, **{key: value for key, value in changes.items() if value is not None})


def is_infrastructure(policy: ErrorPolicy) -> bool:
    """Return whether such a failure says something about machines and services, and nothing about the agent."""
    return policy.blame in ("infrastructure", "api")

"""Prints jobs: agents, errors and slowest trials; one trial in full; comparisons."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rollout.cli.show import console, print_table, table
from rollout.cli.words import counted, first_line
from rollout.config.visible import visible
from rollout.workloads.job.compare import Comparison, Flip, Test
from rollout.workloads.job.compare_directories import Compared
from rollout.workloads.job.intervals import CONFIDENCE
from rollout.workloads.job.job_directory import JobDirectory, KeptTrial
from rollout.workloads.job.overview import (
    AgentOverview,
    Overview,
    dollars,
    number,
    percent,
    seconds,
    shown_ks,
)
from rollout.workloads.job.pass_at_k import PASS
from rollout.workloads.job.regrade import COMPARISON, Regraded, by_agent
from rollout.workloads.job.results import ZERO_TIME, rfc3339
from rollout.workloads.job.verdict import tail
from rollout.workloads.json_form import JsonObject

FILES_SHOWN = 40
CHANGES_SHOWN = 20
_TESTS: dict[Test, str] = {
    "mcnemar_mid_p": "McNemar's mid-p test",
    "sign_flip_exact": "exact sign-flip test",
    "sign_flip_sampled": "sign-flip test, sampled",
}


def print_overview(job: JobDirectory, found: Overview) -> None:
    say = console().print
    say(f"{visible(job.name)}: {_counts(job)}")
    for note in job.notes:
        say(f"warning: {visible(note)}")
    if job.earlier:
        say(visible(earlier_left_out(job)))
    if not job.trials:
        return
    say()
    left = "skipped" if job.state else "pending"
    _print_agents(found.agents, left, datasets=False)
    if found.groups:
        say()
        _print_agents(found.groups, left, datasets=True)
    _print_pass_at_k(found.agents)
    _print_metrics([*found.groups, *found.agents])
    if found.errors:
        say()
        errors = table("error", "trials", "agents", "such as")
        for one in found.errors:
            agents = ", ".join(f"{agent} {count}" for agent, count in one.agents.items())
            errors.add_row(one.type, f"{one.count:,}", visible(agents), first_line(one.example))
        print_table(errors, "")
    say()
    slowest = table("slowest trials", "total", "set-up", "install", "agent", "verifier")
    for trial in found.slowest:
        slowest.add_row(visible(trial.label), *_phases(trial))
    print_table(slowest, "no trial has ended")


def earlier_left_out(job: JobDirectory) -> str:
    """Return a note about trials that no longer belong to the job."""
    return (
        f"{job.name}: {counted(job.earlier, 'earlier trial')} left out: of tasks, agents or attempts that the job does "
        "not have any more"
    )


def _counts(job: JobDirectory) -> str:
    result = job.result
    if not job.state or result is None:
        ended = sum(trial.result is not None for trial in job.trials)
        return f"has not ended; {ended:,} of {counted(len(job.trials), 'trial')} so far"
    text = (
        f"{counted(result.total_trials, 'trial')}: {result.completed_trials:,} completed, {result.failed_trials:,} "
        f"failed, {result.skipped_trials:,} skipped, in {seconds(result.total_duration_sec)}"
    )
    why = f" ({first_line(job.reason)})" if job.reason else ""
    return f"{text}; {job.state}{why}" if job.state != "completed" or job.reason else text


def _print_agents(agents: Sequence[AgentOverview], left: str, *, datasets: bool) -> None:
    """Print agents. `left` is the heading for trials without a result."""
    tokens = any(one.tokens.n_input or one.tokens.n_output for one in agents)
    named = ("agent", "dataset") if datasets else ("agent",)
    more = ("cost", "tokens in", "cached", "out") if tokens else ("cost",)
    interval = f"pass rate [{CONFIDENCE:.0%}]"
    found = table(*named, "n", "completed", "failed", "infra", left, interval, "mean reward", *more)
    for one in agents:
        counts, used = one.statistics.counts, one.tokens
        found.add_row(
            visible(one.agent),
            *((visible(one.dataset or ""),) if datasets else ()),
            f"{counts.total:,}", f"{counts.completed:,}", f"{counts.failed:,}", f"{counts.infrastructure:,}",
            f"{counts.skipped:,}", percent(one.statistics.pass_rate), number(one.statistics.mean_reward),
            dollars(one.cost_usd),
            *((f"{used.n_input:,}", f"{used.n_cache:,}", f"{used.n_output:,}") if tokens else ()),
        )  # fmt: skip
    print_table(found, "no agents")


def _print_pass_at_k(agents: Sequence[AgentOverview]) -> None:
    ks = sorted({each.k for one in agents for each in shown_ks(one.statistics.pass_at_k)})
    if not ks:
        return
    console().print()
    found = table("agent", *(f"pass@{k}" for k in ks))
    for one in agents:
        values = {each.k: percent(each.value) for each in one.statistics.pass_at_k}
        found.add_row(visible(one.agent), *(values.get(k, "-") for k in ks))
    print_table(found, "")


def _print_metrics(agents: Sequence[AgentOverview]) -> None:
    if not any(one.metrics for one in agents):
        return
    console().print()
    found = table("agent", "dataset", "metric", "value")
    for one in agents:
        for name, value in one.metrics.items():
            found.add_row(visible(one.agent), visible(one.dataset or ""), visible(name), f"{value:g}")
    print_table(found, "")


def _phases(trial: KeptTrial) -> list[str]:
    if trial.result is None:
        return ["-"] * 5
    took = trial.result.durations
    phases = (took.environment_setup_sec, took.agent_setup_sec, took.agent_execution_sec, took.verifier_sec)
    return [seconds(took.total_sec), *map(seconds, phases)]


def print_trials(job: JobDirectory, trials: Sequence[KeptTrial], empty: str) -> None:
    """Print a line for each trial."""
    found = table("trial", "status", "reward", "total", "error", "message")
    for trial in trials:
        result = trial.result
        error = result.error if result is not None else None
        reward = "-" if result is None or result.reward is None else f"{result.reward:g}"
        status: str = job.status(trial)
        found.add_row(
            visible(trial.label),
            f"{status}, infrastructure" if job.infrastructure(trial) else status,
            reward,
            _phases(trial)[0],
            error.type if error else "",
            first_line(error.message) if error else "",
        )
    print_table(found, empty)


# ---- one trial


def trial_files(job: JobDirectory, trial: KeptTrial) -> list[str]:
    """Return the trial's files, relative to the current directory or absolute, as the job's directory was named."""
    directory = job.path / trial.label
    return [str(path) for path in sorted(directory.rglob("*")) if path.is_file()]


def trial_json(job: JobDirectory, trial: KeptTrial) -> JsonObject:
    """Return the object of `rollout job show RUN TRIAL --json`."""
    record: Any = None if trial.record is None else trial.record.model_dump(mode="json", exclude={"result"})
    return {
        "job": job.name,
        "trial": trial.label,
        "status": job.status(trial),
        "infrastructure": job.infrastructure(trial),
        "score": job.score(trial),
        "result": None if trial.result is None else trial.result.model_dump(mode="json"),
        "record": record,
        "directory": str(job.path / trial.label),
        "files": trial_files(job, trial),
    }


def print_trial(job: JobDirectory, trial: KeptTrial) -> None:
    say = console().print
    status: str = job.status(trial)
    say(f"{visible(trial.label)}: {status}{', infrastructure' if job.infrastructure(trial) else ''}")
    for name, value in _facts(job, trial):
        say(f"  {name:<14} {visible(value)}")
    result = trial.result
    if result is not None:
        say()
        times, took = result.timestamps, result.durations
        phases = table("phase", "began", "took")
        rows = (
            ("environment", times.environment_setup_started_at, took.environment_setup_sec),
            ("install", times.agent_setup_started_at, took.agent_setup_sec),
            ("agent", times.agent_execution_started_at, took.agent_execution_sec),
            ("verifier", times.verifier_started_at, took.verifier_sec),
        )
        for name, began, length in rows:
            reached = began is not None and began != ZERO_TIME
            phases.add_row(
                name, rfc3339(began) if began and reached else "not reached", seconds(length) if reached else ""
            )
        phases.add_row("all", rfc3339(times.started_at), seconds(took.total_sec))
        print_table(phases, "")
        if result.error is not None:
            say()
            say(f"error {result.error.type}: {visible(result.error.message)}")
    if job.not_passed(trial) and (lines := list(end_of_output(job, trial))):
        say()
        for line in lines:
            say(line, soft_wrap=True)
    files = trial_files(job, trial)
    if files:
        say()
    for path in files[:FILES_SHOWN]:
        say(visible(path), soft_wrap=True)
    if len(files) > FILES_SHOWN:
        say(f"and {len(files) - FILES_SHOWN:,} more files in {job.path / trial.label}")


def end_of_output(job: JobDirectory, trial: KeptTrial) -> Iterator[str]:
    """Yield the last lines of the file that explains why a trial did not pass, after its name."""
    for path, lines in tail(job, trial):
        yield visible(f"{path}, the end of it:")
        yield from (f"  {visible(line)}" for line in lines)


def _facts(job: JobDirectory, trial: KeptTrial) -> Iterable[tuple[str, str]]:
    score = job.score(trial)
    if score is not None:
        yield "score", f"{score:g}, {'passed' if score >= PASS else 'not passed'}"
    if trial.result is not None and trial.result.reward is not None and trial.record is None:
        yield "reward", f"{trial.result.reward:g}"
    if trial.result is not None and trial.result.task_git_commit_id:
        yield "commit", trial.result.task_git_commit_id
    if trial.result is not None and trial.result.cost:
        yield "cost", dollars(trial.result.cost)
    record = trial.record
    if record is None:
        return
    if record.rewards is not None:
        yield "rewards", _rewards(record.rewards)
    for step in record.steps:
        text = "no rewards" if step.rewards is None else _rewards(step.rewards)
        yield f"step {step.name}", f"{text}; {step.error[0]}: {step.error[1]}" if step.error else text
    used = record.usage
    if used.n_input_tokens or used.n_output_tokens:
        yield (
            "tokens",
            f"{used.n_input_tokens:,} in, of them {used.n_cache_tokens:,} cached; {used.n_output_tokens:,} out",
        )
    named = (
        ("agent version", record.agent_version),
        ("provider", record.provider),
        ("network", record.network),
        ("worker", trial.worker),
    )
    for name, value in named:
        if value:
            yield name, value
    if trial.tries > 1:
        yield "tries", f"{trial.tries}; what the earlier ones left is in tries/"
    if record.environment_cost_usd:
        yield "sandbox cost", dollars(record.environment_cost_usd)
    if record.preserved:
        yield "kept sandbox", record.preserved
    for remark in record.remarks:
        yield "remark", remark


def _rewards(rewards: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in rewards.items())


# ---- comparisons


def print_compared(found: Compared, job_a: str, job_b: str) -> None:
    say = console().print
    one = found.comparison
    say(f"A: {visible(one.agent_a)} of {visible(job_a)}   B: {visible(one.agent_b)} of {visible(job_b)}")
    say(f"  {counted(one.tasks, 'task')} scored in both: A {one.mean_a:.4g}, B {one.mean_b:.4g}")
    known = one.low is not None and one.high is not None
    interval = f" [{one.low:+.4g}, {one.high:+.4g}], a {CONFIDENCE:.0%} interval" if known else _why_none(one)
    say(f"  difference B - A {one.difference:+.4g}{interval}")
    exact = f"; exact {one.p_exact:.3g}" if one.p_exact is not None else ""
    say(f"  p = {one.p_value:.3g} ({_TESTS[one.test]}{exact})")
    if one.discordant is not None:
        say(f"  solved by A alone {one.discordant[0]:,}, by B alone {one.discordant[1]:,}")
    for title, flips in (
        ("most attempts pass in B, and not in A", one.gained),
        ("most attempts pass in A, and not in B", one.lost),
    ):
        if flips:
            say(f"  {title}: {counted(len(flips), 'task')}")
        for flip in flips:
            say(f"    {visible(f'{flip.dataset}/{flip.task}')}  {_flip(flip)}")
    for side, names in (("A", found.only_a), ("B", found.only_b)):
        if names:
            say(f"  scored in {side} alone, and not compared: {counted(len(names), 'task')}: {_some(names)}")
    if found.moved:
        say(f"  warning: {counted(len(found.moved), 'task')} of another commit in B than in A: {_some(found.moved)}")


def _why_none(one: Comparison) -> str:
    """Return why there is no interval."""
    return ", of one task: no interval" if one.tasks < 2 else ", of every task alike: no interval"


def _flip(flip: Flip) -> str:
    return f"A {flip.a_pass_rate:.0%}, B {flip.b_pass_rate:.0%}"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(map(visible, names[:10]))
    return f"{shown} and {len(names) - 10:,} more" if len(names) > 10 else shown


def print_written(path: Path, count: int) -> None:
    console().print(f"{visible(str(path))}: {counted(count, 'trial')}", soft_wrap=True)


# ---- what a new verifier changed


def print_regraded(directory: Path, found: Sequence[Regraded]) -> None:
    say = console().print
    say(f"{counted(len(found), 'trial')} verified again, {sum(one.changed for one in found):,} came out otherwise")
    agents = table("agent", "scored twice", "pass rate before", "after", "mean reward before", "after")
    for one in by_agent(found):
        rates = [_rate(one.pass_rate_before), _rate(one.pass_rate_after)]
        rewards = [_reward(one.mean_reward_before), _reward(one.mean_reward_after)]
        agents.add_row(visible(one.agent), f"{one.trials:,}", *rates, *rewards)
    print_table(agents, "")
    changed = [one for one in found if one.changed]
    for one in changed[:CHANGES_SHOWN]:
        before, after = _came(one.before, one.error_before), _came(one.after, one.error_after)
        say(f"  {visible(one.trial)}: {before} -> {after}")
    if len(changed) > CHANGES_SHOWN:
        say(f"  and {len(changed) - CHANGES_SHOWN:,} more in {directory / COMPARISON}")
    say(f"results: {visible(str(directory))}", soft_wrap=True)


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.1f} %"


def _reward(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _came(score: float | None, error: str | None) -> str:
    return " ".join(part for part in (_reward(score) if score is not None else "", error or "") if part) or "not scored"

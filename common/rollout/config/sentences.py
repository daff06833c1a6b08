"""Sentence for people for each log event.

`{field}` is a field of the event; text in [brackets] is omitted if one of its fields is empty or 0. `{n:worker}`
counts: 1 worker, 3 workers. `{n:s}` is a duration, `{n:bytes}` a size, `{n:,}` a list, `{n:time}` a Unix time in
milliseconds shown as local time. Ids are shown short. The names and fields of events are for programs and never change.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rollout.model.ids import short


@dataclass(frozen=True, slots=True)
class Sentence:
    """Sentence of one event.

    An empty `text` means that another event says the same; users do not see it. `about` lists the fields that identify
    a condition, which is reported once while it lasts, then now and then; None means that each event is reported.
    `ends` names the conditions that this event ends.
    """

    text: str
    about: tuple[str, ...] | None = None
    ends: tuple[str, ...] = ()


def _said(text: str, *ends: str) -> Sentence:
    return Sentence(text, ends=ends)


def _trouble(text: str, *about: str, ends: tuple[str, ...] = ()) -> Sentence:
    return Sentence(text, about=about, ends=ends)


_WORKER = "worker {worker}[ on {host_name}][ ({address})]"
_RUN = "run {run_id}[ {name}]"
_COUNTS = "[; {done:item} done][; {failed:item} failed][; {items:item} in all]"
_STORE = ("storage_unavailable", "ledger_unreachable", "storage_unreachable", "lease_store_unavailable")

SENTENCES: dict[str, Sentence] = {
    # ---- a coordinator
    "coordinator_ready": _said(
        "ready: the coordinator at {addr} leads the cluster[; new hosts join at {join_addr}][; health and metrics are "
        "at http://{http_addr}]",
        "lease_lost",
        "lease_renewal_failed",
        *_STORE,
    ),
    "coordinator_standby": _said("standing by at {addr}: takes over when the leader fails", *_STORE),
    "coordinator_fenced": _trouble(
        "another coordinator leads the cluster now[, at {leader}], so this one ends; start it again, and it stands by "
        "({reason})"
    ),
    "coordinator_failed": _trouble("the coordinator cannot go on: {error}"),
    "coordinator_stopping": _said("the coordinator[ at {addr}] stops[: {reason}]"),
    "coordinator_stopped": _said("the coordinator has stopped; everything that it accepted is in the database"),
    "predecessor_failed": _said(
        "the coordinator that led before[, at {address},] ended without being stopped (killed, crashed or cut off)"
        "[; it was last seen at {seen_ms:time}][; after that nothing led the cluster, for {gap_s:s} at most]"
    ),
    "predecessor_stopped": _said(
        "the coordinator that led before[, at {address},] was stopped in order[ at {seen_ms:time}][; nothing led the "
        "cluster for {gap_s:s}]"
    ),
    "lease_acquired": _said(""),  # coordinator_ready says the same, when it serves
    "lease_standby": _said("[the coordinator at {leader} leads the cluster]"),
    "lease_lost": _trouble("this coordinator does not lead any more: {reason}; {action}"),
    "lease_renewal_failed": _trouble("this coordinator could not confirm in the database that it still leads: {error}"),
    "lease_not_released": _trouble("this coordinator could not hand over the lead: {error}; {hint}"),
    "lease_store_unavailable": _trouble("the database that says who leads does not answer: {error}"),
    "epoch_ahead": _trouble(
        "somebody has seen a newer leader of this cluster (number {seen}) than this coordinator (number {epoch})"
        "[: {error}][; {hint}]"
    ),
    "storage_unavailable": _trouble("the database does not answer: {error}; {action}"),
    "storage_unreachable": _trouble("the database does not answer: {error}; next try in {retry_in_s:s}"),
    "storage_full": _trouble("the database cannot grow: {error}; {action}"),
    "storage_damaged": _trouble("the database is damaged: {error}; {action}"),
    "database_failing": _trouble("the database fails: {error}; {action}", "error"),
    "database_works_again": _said("the database works again", "database_failing"),
    "storage_fault": _trouble("the disk under the database fails: {error}; {action}"),
    "ledger_unreachable": _trouble("the database does not answer: {error}; next try in {retry_in_s:s}"),
    "ledger_replayed": _said(
        "[took up {runs:unfinished run} from the database][; {open_attempts:item} were at workers, who are expected to "
        "connect again]",
        *_STORE,
    ),
    "ledger_slow": _trouble("the database is slow, a commit took {commit_s:s}: {action}"),
    "configuration_read": _said("starts, with the configuration {path}"),
    "maintenance_failed": _trouble("cleaning up the database failed: {error}"),
    "kv_listen_lost": _trouble("the database does not report changes any more: {hint}"),
    # ---- its objects
    "objects_unreachable": _trouble("{place}[ at {endpoint}] does not answer; trying for 60 s", "place"),
    "objects_unavailable": _trouble("objects cannot be reached: {error}; next try in {retry_in_s:s}"),
    "traces_not_exported": _trouble("{endpoint} takes no traces: {action}"),
    "traces_exported_again": _said("{endpoint} takes traces again", "traces_not_exported"),
    "page_says": _said("the live page: {text}"),
    "ui_ready": _said("the live page is at {url}", "ui_ended"),
    "ui_ended": _trouble("the live page has ended ({reason}); it starts again in {restart_in_s:s}"),
    "objects_server_died": _trouble("the objects server ended ({code}); it starts again in {restart_in_s:s}"),
    "objects_server_not_started": _trouble("the objects server does not start: {error}; next try in {retry_in_s:s}"),
    "objects_server_restarted": _said(
        "the objects server runs again, at {addr}", "objects_server_died", "objects_server_not_started"
    ),
    "objects_collected": _said("removed {objects:object} that nothing needs any more, {bytes:bytes}"),
    "object_not_freed": _trouble("object {object_id} was not removed; it is tried again in an hour ({error})"),
    "object_missing": _trouble("results name {objects:object} that the store does not have ({first})", "first"),
    "cloud_conditions_ignored": _said(
        "the bucket {bucket} does not keep to conditions on writes: two writers of one key are not kept apart there"
    ),
    "cloud_credentials_renewed": _said("the cloud's credentials had expired; newer ones were looked up"),
    "cloud_call_again": _trouble("{what} ({said}); tried again in {wait_s:s}", "what"),
    "cloud_read_resumed": _trouble("reading {key} broke off at byte {at} and goes on there ({said})", "key"),
    "cloud_part_not_asked": _said(""),
    "cloud_upload_again": _trouble("the upload to {key} starts over, since its session is gone ({said})", "key"),
    "cloud_upload_left": _trouble("an unfinished upload to {key} could not be aborted ({error})", "key"),
    "cloud_abort_late": _trouble("an unfinished upload could not be aborted within {deadline_s:s}"),
    "cloud_probe_left": _trouble("{key}, one byte that may be deleted, could not be removed ({error})", "key"),
    "cloud_temporary_left": _trouble("{key} could not be removed; it goes when it is a week old ({error})", "key"),
    "cloud_leftovers_removed": _said("removed {count} leftovers of uploads that were cut off from {bucket}"),
    "cloud_leftovers_not_removed": _trouble(
        "what uploads that were cut off left in {bucket} was not removed ({error})", "bucket"
    ),
    "object_corrupt": _trouble("object {object_id} is damaged; it was moved to {moved_to}", "object_id"),
    "object_get_resumed": _said("reading object {object_id} on from {offset:bytes}: {reason}"),
    "objects_retry": _said("asking for objects again, try {attempt}"),
    # ---- hosts and certificates
    "dev_ca_generated": _said(
        "made a certificate authority for this cluster, which signs the certificates of hosts that join: {path}"
    ),
    "host_joined": _said("host[ {name}] ({host}) joined the cluster as {role}[, from {peer}]"),
    "host_revoked": _said("host[ {name}] ({host}), {role}, is shut out of the cluster"),
    "join_refused": _trouble("host {host_name} may not join: its token was refused[, from {peer}]", "host_name"),
    "replica_refused": _trouble(
        "worker {worker} announced a replica of run {run_id} that the coordinator has not given to it",
        "worker",
        "run_id",
    ),
    "connections_closed": _trouble(
        "closed {count:connection} to {port} that had said nothing, most from {most_from}: {reason}", "port"
    ),
    "revocations_not_read": _trouble("the list of hosts that are shut out cannot be read: {reason}"),
    "coordinators_not_read": _trouble("the list of this cluster's coordinators cannot be read: {reason}"),
    "host_certificate_renewed": _said("this host's certificate was renewed", "host_certificate_not_renewed"),
    "host_certificate_not_renewed": _trouble("this host's certificate cannot be renewed: {reason}"),
    "certificate_renewed": _said("the certificate was renewed", "certificate_not_renewed"),
    "certificate_not_renewed": _trouble("the certificate cannot be renewed: {reason}[; it ends at {not_after}]"),
    "certificate_unavailable": _trouble("no certificate yet: {error}"),
    # ---- workers, as the coordinator sees them
    "worker_registered": _said(""),  # worker_ready says that it is there
    "worker_heartbeat": _said(""),
    "worker_ready": _said(
        f"{_WORKER} is ready[ again: it was lost for {{lost_s:s}}][; it takes the place of worker {{replaces}}, which "
        "was lost]",
        "certificate_unavailable",
    ),
    "worker_failed": _said(f"{_WORKER} is lost: {{reason}}[; the {{items:item}} given to it go to other workers]"),
    "worker_told_to_drain": _said(f"{_WORKER} gets no new work: {{reason}}[; it still has {{items:item}} to finish]"),
    "worker_deregistered": _said(f"{_WORKER} left[: {{reason}}][; {{items:item}} it did not finish go to others]"),
    "worker_quarantined": _trouble(f"{_WORKER} gets no more work, it broke the protocol: {{reason}}", "worker"),
    "worker_reconciled": _said(
        f"{_WORKER} is connected again[; it goes on with {{kept:item}}][; it sends {{resend:result}} again, without "
        "computing anything again][; {accepted:result} had arrived before][; it drops {dropped:item} that others did "
        "or that nobody wants now][; {repended:item} that it does not have any more will be done again]"
    ),
    # To even out the work is no news: once, then now and then.
    "work_stolen": Sentence(
        "worker {thief} had nothing left to start and takes {count:unstarted item} from worker {victim}", about=()
    ),
    "history_not_written": _said("what happened could not be recorded yet, another try follows: {error}"),
    "more_work_stolen": _said("other idle workers take over {count:unstarted item} from busy ones"),
    "events_dropped": _said("so much happened at once that {count:event} are not told here"),
    # ---- runs
    "run_submitted": _said(f"{_RUN} ({{workload}}) was submitted[ by the {{by}}][, from {{address}}]"),
    "run_sealed": _said(f"{_RUN} has all of its input: {{items:item}}"),
    "run_paused": _said(f"{_RUN} is paused[ by the {{by}}][: {{reason}}][; {{in_flight:item}} still at workers]"),
    "run_resumed": _said(f"{_RUN} goes on[, resumed by the {{by}}][: {{reason}}]"),
    "run_continued": _said(f"{_RUN} goes on[, continued by the {{by}}][: {{reason}}]"),
    "result_not_shown": _trouble("a result of run {run_id} cannot be shown: {error}"),
    "results_not_read": _said("results of run {run_id} cannot be read now: {error}"),
    "run_completed": _said(
        f"{_RUN} is complete: {{done}} of {{items:item}} done[, {{skipped}} skipped][, {{cancelled}} cancelled]"
        "[, {failed} failed; `rollout run items {run_id} --failed` lists them]"
        "[; {most_common_count} of them like this: {most_common}][; one of them like this: {such_as}]"
    ),
    "rest_skipped": _said(f"{_RUN} skips what has not begun: {{reason}}"),
    "run_failed": _said(f"{_RUN} failed: {{reason}}{_COUNTS}"),
    "run_killed": _said(f"{_RUN} was killed[ by the {{by}}][: {{reason}}]{_COUNTS}"),
    "run_interrupted": _said(f"{_RUN} was interrupted: {{survivors:item}} did not stop in time"),
    "run_deleted": _said("run {run_id} was deleted[ by the {by}][: {items:item}][, {objects_freed:object} freed]"),
    "row_failed": _said("row {row} of run {run_id} failed for good[ on worker {worker}], {code}: {error}"),
    "item_cancelled": _said("row {row} of run {run_id} was cancelled[ by the {by}][: {reason}]"),
    "more_rows_failed": _said("{count:more row} of run {run_id} failed for good"),
    "output_removed": _said(
        "what run {run_id} printed ({bytes:bytes}) was removed, since newer runs printed more than is kept in all"
    ),
    "item_committed": _said("run {run_id}: {cursor:item} committed"),
    # ---- a worker
    "worker_starting": _said("worker {worker} starts and does {slots:item} at a time"),
    "worker_stopped": _said("the worker stopped: {why}"),
    "worker_refused": _trouble("the cluster does not let this worker in: {error}"),
    "worker_config_error": _trouble("{error}"),
    "worker_failed_to_run": _trouble("the worker cannot go on: {error}"),
    "worker_draining": _said("takes no new work: {reason}[; {held:item} still to finish, within {budget_s:s}]"),
    "worker_fenced": _trouble("no answer from the coordinator for {silent_s:s}: nothing new is started"),
    "worker_unfenced": _said("work is started again", "worker_fenced"),
    "worker_orphaned": _trouble("the coordinator did not come back: {dropped:item} given up"),
    # The worker paces these itself.
    "coordinator_lost": _said(
        "[still, for {lost_s:s} ({times} times): ]the coordinator at {addr} does not answer: {error}"
    ),
    "coordinator_found": _said("the coordinator at {addr} answers again, after {lost_s:s}"),
    "relay_unsent": _said("answers to gateways wait to be sent ({bytes:bytes}): {action}"),
    "no_coordinator": _said("no coordinator lets this worker in[ ({addrs:,})]: {error}; {action}"),
    "coordinator_unavailable": _trouble("the coordinator at {addr} does not lead[, the one at {hint} may]: {error}"),
    "coordinator_unreachable": _trouble("{address} does not answer for {seconds:s}: {reason}", "address"),
    "coordinator_broke_protocol": _trouble("the coordinator sent what it must not: {error}"),
    "control_ended": _said("the connection that brings a coordinator's orders ended: {error}"),
    "control_ignored": _said("an order of a kind that this worker does not know: {kind}"),
    "log_level_unknown": _said("there is no log level {level}"),
    "work_write_failed": _said("writing to the coordinator failed: {error}"),
    "beat_failed": _trouble("a heartbeat failed: {error}"),
    "beat_refused": _trouble("a heartbeat was refused: {error}"),
    "beats_ended": _said("the connection for heartbeats ended: {error}"),
    "http_ready": _said("health and metrics at {addr}"),
    "preemption_notice": _said(
        "this machine goes away in {lead_s:s}[: {reason}]; the work that it has is given {budget_s:s} to finish"
    ),
    "handed_over": _said("the state at step {step} is handed over to another worker"),
    "hand_over_taken": _said("goes on from step {step}, which another worker handed over"),
    "hand_over_ignored": _said("what another worker handed over at step {step} is not used: {error}"),
    "hand_over_failed": _said("the steps so far cannot be handed over: {error}"),
    "executor_unavailable": _trouble("executor {executor} cannot be used here: {error}", "executor"),
    "metadata_unanswered": _trouble("the machine's metadata service does not answer, so no notice is heard: {error}"),
    "compute_is_local": _said("this machine's cloud is not asked for labels and notices: {why}"),
    "compute_has_no_labels": _trouble("the labels of this machine in its cloud are not known: {error}"),
    "rebalance_recommended": _said("EC2 recommends to leave this instance: an interruption is likely"),
    "maintenance_migrates": _said("Compute Engine moves this machine to another host; the work goes on"),
    "secret_not_set": _said("secret {name} is not set: {error}"),
    "secret_is_stale": _trouble(
        "secret {name} cannot be read anew, so its value of {age_s:s} ago is used: {error}", "name"
    ),
    # ---- its processes and engines
    "child_starting": _said("process {child} starts, for {executor} ({kind})"),
    "child_crashed": _said(
        "process {child} crashed ({reason}) with {attempts:attempt}[; another starts in {restart_in_s:s}]"
    ),
    "child_broke_protocol": _said("process {child} sent what it must not ({error}) and is ended"),
    "child_output": _said("process {child}: {text}"),
    "child_output_dropped": _trouble("process {child} prints too much: {lines:line} were dropped", "child"),
    "output_lost": _trouble("{lines:line} of output could not be shipped before this worker left"),
    "output_not_shipped": _said("what children of run {run_id} printed is not taken: {error}"),
    "attempt_not_cleaned_up": _said("what attempt {seq} left is not cleaned up; its result stands: {error}"),
    "guard_lost": _trouble("the process that cleans up after this worker is gone: {error}"),
    "memory_limits": _said("memory is limited by {by}"),
    "memory_group_failed": _trouble("memory cannot be limited with {group}: {error}", "group"),
    "policy_version": _said(""),
    "bad_frame_of_a_gateway": _said("a frame of gateway {channel} cannot be read: {error}"),
    "request_repeated": _said("gateway {channel} asked twice under the number {id}; the second request is ignored"),
    "request_failed": _said("a request failed by a fault of the replica: {error}"),
    "generation_config_unread": _said("{path} cannot be read, so it suggests nothing: {error}"),
    "engine_ready": _said(
        "the engine is ready: {backend}[ on {device}], {concurrency:row} at once[, for run {run_id}]",
        "engine_start_failed",
    ),
    "engine_start_failed": _trouble("the engine does not start: {error}[; next try in {retry_in_s:s}]", "code"),
    "worker_cannot_start": _trouble(
        "worker {worker}[ on {host}] cannot start {executor} for run {run_id}: {error}", "code"
    ),
    "engine_step_failed": _trouble("the engine failed at {rows:row}: {error}", "code"),
    "engine_dead": _said("the engine of {model} is dead: {error}"),
    # ---- sandboxes and trials
    "sandboxes_ready": _said("sandboxes of {provider} are ready, for run {run_id}[: {notes:,}]", "sandboxes_missing"),
    "sandboxes_missing": _trouble("{provider} sandboxes cannot be had here, for run {run_id}: {why}", "provider"),
    "sandbox_not_removed": _said("something of the sandbox {sandbox} is left: {error}"),
    "sandbox_not_reaped": _trouble("the sandbox {sandbox} that somebody left is not removed: {error}", "sandbox"),
    "sandbox_not_warmed": _trouble("no sandbox can be kept ready: {error}"),
    "sandbox_full": _said("the sandbox {sandbox} has more on the disk than it may: what runs in it is ended"),
    "sandbox_storage_exceeded": _said(
        "the sandbox {sandbox} has {used_mb} MiB on the disk, more than it may: what runs in it is ended"
    ),
    "sandbox_storage_unknown": _trouble("what the sandbox {sandbox} has on the disk is not known: {error}", "sandbox"),
    "sandbox_connection_refused": _said("a connection of a sandbox was refused: {reason}"),
    "image_not_refreshed": _trouble("image {image} is used as it was fetched before: {reason}", "image"),
    "image_not_removed": _trouble("{path}, an image that is not used, is not removed: {error}", "path"),
    "image_pruned": _said("image {image}, {size_mb} MiB, was not used for long and is removed"),
    "agent_installation_kept": _said("the installation of an agent is kept in {path}, {bytes:bytes}"),
    "agent_broke": _said("the agent of trial {trial} raised an error of its own"),
    "trial_broke": _said("trial {trial} ended with a fault of this program"),
    "lane_paused": _said("agents of {lane} wait {seconds:s}, since their service asked for it ({why})"),
    # ---- plugins
    "plugin_loaded": _said("plugin {plugin} is loaded ({mode})", "plugin_load_error"),
    "plugin_load_error": _trouble("plugin {plugin} cannot be loaded: {error}", "plugin"),
    "plugin_reloaded": _said("plugin {plugin} was loaded anew", "plugin_reload_failed"),
    "plugin_reload_failed": _trouble("plugin {plugin} cannot be loaded anew: {error}", "plugin"),
    "plugin_restarted": _said("plugin {plugin} was started again, after {faults:fault}"),
    "plugin_call_error": _trouble("plugin {plugin} failed[ in {method}][ ({reason})]: {error}", "plugin", "method"),
    "plugin_output": _said("plugin {plugin}: {line}"),
    "plugin_output_dropped": _trouble("plugin {plugin} prints too much: lines over {lines_per_s} a second are dropped"),
    "queue_in_flight_limit": _trouble(
        "queue {queue} hands out no more: its takers hold {limit} messages, which is its limit; rows that are done make"
        " room",
        "queue",
    ),
    "queue_not_given_back": _trouble(
        "messages[ of queue {queue}] that nobody worked on could not be given back: {error}; they come again when their"
        " lease ends"
    ),
}

MARKED = frozenset({"warning", "error", "critical"})
"""Levels that are shown; other levels are not named in a sentence."""

VERBATIM = frozenset({"child_output", "plugin_output"})
"""Events that pass on output of others: a repeated line is a condition of its own."""
_ID = re.compile(r"(?<![\w/-])[0-7][0-9A-HJKMNP-TV-Z]{25}(?![\w/-])")
_OPTIONAL = re.compile(r"\[([^\[\]]*)\]")


def sentence_of(event: str, fields: Mapping[str, Any]) -> str | None:
    """Return the sentence of `event`, empty to say nothing, or None if it has no sentence."""
    known = SENTENCES.get(event)
    if known is None:
        return None
    # Each part by itself: what is filled in may have braces and brackets of its own.
    parts = _OPTIONAL.split(known.text)
    said = "".join(_filled(part, fields) for n, part in enumerate(parts) if n % 2 == 0 or _has_all(part, fields))
    return said if event in VERBATIM else shortened(said)


def marked(said: str, level: str) -> str:
    """Return `said` with its level, so that a warning or error is recognizable without colors."""
    return f"{level}: {said}" if level in MARKED else said


def shortened(text: str) -> str:
    """Return `text` with short ids."""
    return _ID.sub(lambda found: short(found[0]), text)


class _Words(string.Formatter):
    def get_value(self, key: int | str, args: Any, kwargs: Any) -> Any:
        return kwargs.get(str(key), "")

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec == ",":
            return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)  # pyright: ignore
        if not format_spec or not isinstance(value, int | float):
            return str(value)
        if format_spec == "s":
            return duration(value)
        if format_spec == "bytes":
            return size(value)
        if format_spec == "time":
            return f"{datetime.fromtimestamp(value / 1000):%Y-%m-%d %H:%M:%S}"
        return f"{value} {format_spec}{'' if value == 1 else 's'}"


_words = _Words()


def _filled(text: str, fields: Mapping[str, Any]) -> str:
    return _words.vformat(text, (), fields)


def _has_all(text: str, fields: Mapping[str, Any]) -> bool:
    return all(fields.get(name) for _, name, _, _ in _words.parse(text) if name)


def duration(seconds: float) -> str:
    """Return a duration as `0.4 s`, `25 s`, `3 min`, `2 h 5 min`."""
    if 0 < seconds < 0.1:
        return f"{max(1, seconds * 1000):.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s".replace(".0 s", " s")
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest} min" if rest else f"{hours} h"


def size(count: float) -> str:
    """Return a size as `812 bytes`, `4.2 MiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError

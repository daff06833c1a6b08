"""The client: submitting through failovers, watching, collecting into files."""

from __future__ import annotations

from removal import Edit
from safeguard import Safeguard, cut, never

COLLECT, OUTPUT = "rollout.workloads.infer.collect:Collector", "rollout.workloads.infer.output"
SUBMIT, RUNS = "rollout.client.submit:Submission", "rollout.client.runs:Runs"
FILES = "core/test_infer_collect.py::"

SAFEGUARDS = (
    Safeguard(
        "collect: the restart cursor",
        "What was written before a kill is not written again.",
        never(f"{COLLECT}.add", "entry.position < self.cursor"),
        (f"{FILES}test_gap_and_repeat",),
    ),
    Safeguard(
        "collect: no gap",
        "A row that is missing in the log is noticed.",
        never(f"{COLLECT}.add", "entry.position > self.cursor"),
        (f"{FILES}test_gap_and_repeat",),
    ),
    Safeguard(
        "collect: files before their cursor",
        "The recorded cursor never passes what is on disk.",
        cut(
            f"{COLLECT}.flush",
            "        marks = {name: file.sync() for name, file in self._files.items()}\n",
            "        marks = {}\n"
            "        for name, file in self._files.items():\n"
            "            data = b''.join(file._buffer)\n"
            "            tail = (file._tail + data)[-4096:]\n"
            "            marks[name] = {'bytes': file.size + len(data), 'tail': blake3(tail).hexdigest()}\n"
            "        state = {'run_id': self._run_id, 'cursor': self.cursor, 'files': marks,"
            " 'totals': asdict(self.totals)}\n"
            "        write_atomically(self._directory / STATE, json.dumps(state).encode())\n"
            "        marks = {name: file.sync() for name, file in self._files.items()}\n",
        ),
        ("core/test_client_guards.py::test_the_cursor_is_recorded_after_the_rows",),
    ),
    Safeguard(
        "collect: cut back to the record",
        "What was written behind the recorded cursor is cut off, not doubled.",
        (
            Edit(f"{OUTPUT}:GrowingFile.restore", "self._file.truncate(size)", "pass"),
            Edit(f"{OUTPUT}:GrowingFile.restore", "self._file.seek(size)", "size = self._file.seek(0, 2)"),
        ),
        (f"{FILES}test_torn_tail_and_edited_file",),
    ),
    Safeguard(
        "collect: the tail's hash",
        "A file that was edited is written anew from the ledger.",
        cut(f"{OUTPUT}:GrowingFile.restore", 'blake3(self._tail).hexdigest() == mark["tail"]', "True"),
        ("core/test_client_guards.py::test_an_edited_file_of_the_same_length_is_written_anew",),
    ),
    Safeguard(
        "collect: whose record it is",
        "The cursor of another run is not taken for this one's.",
        never(f"{COLLECT}._restore", 'state.get("run_id") != self._run_id'),
        ("core/test_client_guards.py::test_the_record_of_another_run_counts_for_nothing",),
    ),
    Safeguard(
        "collect: fsync of outputs",
        "What the recorded cursor counts survives a power loss.",
        cut(f"{OUTPUT}:GrowingFile.sync", "os.fsync(self._file.fileno())", "pass"),
        ("core/test_client_guards.py::test_the_cursor_is_recorded_after_the_rows",),
    ),
    Safeguard(
        "collect: atomic records",
        "A full disk leaves the old record, not half of a new one.",
        cut(f"{OUTPUT}:write_atomically", 'path.with_name(f"{path.name}.tmp")', "path"),
        (f"{FILES}test_atomic_write_keeps_the_old_file",),
    ),
    Safeguard(
        "one process an output directory",
        "Two commands do not write the same files.",
        cut(f"{OUTPUT}:OutputDirectory.open", "fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass"),
        (f"{FILES}test_whose_directory",),
    ),
    Safeguard(
        "output directory of another run",
        "A run does not write into the results of another.",
        never(f"{OUTPUT}:OutputDirectory.check", "resume is not None and own is not None and own != resume"),
        (f"{FILES}test_whose_directory",),
    ),
    Safeguard(
        "results of a run that was given up",
        "They are moved aside, not overwritten.",
        cut(f"{OUTPUT}:OutputDirectory.claim", "self._move_aside(own)", "pass"),
        (f"{FILES}test_whose_directory",),
    ),
    Safeguard(
        "resume fingerprint: configuration",
        "A changed sampling value is named, not mixed into the old results.",
        cut("rollout.workloads.infer.plan:_differences", "if before.get(key) != after.get(key):", "if False:"),
        ("core/test_infer_plan.py::test_changes_are_named",),
    ),
    Safeguard(
        "item ids hash what changes the result",
        "Another model, prompt or sampling is another item.",
        cut("rollout.workloads.infer.request:item_id", ", _dumped(request.sampling)[1]):", "):"),
        ("core/test_infer_plan.py::test_ids_change_with_all_that_changes_the_result",),
    ),
    Safeguard(
        "submit: batches are kept until they are durable",
        "What a dead leader did not acknowledge is sent again.",
        cut(
            f"{SUBMIT}._acknowledged",
            "while self._window and self._window[0].end <= self._durable:",
            "while self._window:",
        ),
        ("core/test_client_guards.py::test_what_was_not_acknowledged_is_sent_again",),
    ),
    Safeguard(
        "submit: a ledger that went back",
        "A ledger restored from an older backup is noticed.",
        never(f"{SUBMIT}._acknowledged", "reply.durable < self._durable"),
        ("core/test_client_guards.py::test_a_ledger_that_lost_acknowledged_items_is_noticed",),
    ),
    Safeguard(
        "watch: the page that was asked for",
        "Pages of a commit log are not taken twice or out of order.",
        never("rollout.client.runs:_page", "batch.from_cursor != cursor"),
        ("core/test_client_guards.py::test_a_page_of_another_place_is_refused",),
    ),
    Safeguard(
        "watch: the last row before the last status",
        "A run is not called complete before its client has every row.",
        cut(
            f"{RUNS}._pages",
            "reached < page.status.cursor:",
            "False:",
        ),
        ("core/test_client_guards.py::test_an_end_before_the_last_row_is_not_believed",),
    ),
    Safeguard(
        "columns of a commit batch",
        "A batch whose columns differ is refused whole.",
        cut("rollout.client.pages:entries_of", "if any(len(column) != count for column in columns):", "if False:"),
        ("core/test_client_guards.py::test_columns_of_a_page_agree",),
    ),
    Safeguard(
        "collect: a Ctrl-C waits for the writer",
        "The files of a batch are not closed, nor their cursor saved, beside a thread that is writing them.",
        cut("rollout.cli.collecting:_to_its_end", "            cancelled = error\n", "            raise error\n"),
        ("core/test_cli_collecting.py::test_a_batch_that_is_stopped_while_it_writes_closes_its_files_afterwards",),
    ),
)

"""Kinds of frames between the daemon and its child processes, and their bodies (protobuf or JSON)."""

from __future__ import annotations

from enum import IntEnum


class Kind(IntEnum):
    # daemon to child
    INIT = 1  # JSON {run, scratch, cache, secrets}
    ASSIGN = 2  # AssignGroup
    CANCEL = 3  # AttemptKeys
    CHILDREN = 4  # ChildResults
    RESUME = 5  # Resume
    REPLY = 6  # JSON {id, value | error}
    STOP = 7
    RECALL = 8  # AttemptKeys: give back those that have not begun
    LEAVE = 9  # JSON {budget_s}
    HOLD = 10  # JSON {on}: begin nothing outside, or go on
    # both ways
    RELAY = 11  # to a replica: WorkDown heard or hung_up; from it: WorkUp announce, withdraw or said
    # child to daemon
    READY = 20  # JSON {width}
    FAILED = 21  # JSON {code, message, retryable}
    RESULTS = 22  # ResultGroup
    SPAWN = 23  # Spawn
    WAITING = 24  # Waiting
    PROGRESS = 25  # Progress
    REQUEST = 26  # JSON {id, op, ...}
    RETURNED = 27  # AttemptKeys: of a recall, those that had not begun
    HINDERED = 28  # JSON {log, seq, attempt, code, message, retryable, returned}

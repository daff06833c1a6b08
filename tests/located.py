"""Where an error says that its faults are: what tests compare, in place of the sentences."""

from __future__ import annotations

import re

from rollout.model.problems import faults_of


def places(message: str) -> list[str]:
    """The places of the faults of `message`, one by one, each as it is printed before the sentence: `file:line: key`.

    A fault that names no place is an empty string.
    """
    return [
        found[0].rstrip(": ") for fault in faults_of(message) if (found := re.match(r"(\S+( \(.*? rows\))?: )*", fault))
    ]

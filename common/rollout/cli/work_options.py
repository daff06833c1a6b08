"""Options of every workload's command beside its own."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rollout.cli.options import chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Shared options.

    `words` is the command as typed, without these options: `rollout infer batch --config FILE`. `local` restricts the
    work to this machine, whatever cluster is named. `extend` runs rows that were added to the input of a complete run.
    `retry` is as in `carry_over`, for the complete run in the output directory. `show_output` prints what the run's
    processes print.
    """

    words: tuple[str, ...]
    name: str = ""
    coordinators: tuple[str, ...] = ()
    tls_dir: Path | None = None
    resume: str | None = None
    workers: int | None = None
    dry_run: bool = False
    detach: bool = False
    json: bool = False
    local: bool = False
    extend: bool = False
    retry: frozenset[str] | None = None
    show_output: bool = False

    def command(self, known: Sequence[str] = (), *, resume: str = "") -> str:
        """Return the command that resumes.

        `known` lists every coordinator, because the named one may be down by then. `resume` is the run, if it has to be
        named.
        """
        words = list(self.words)
        for address in known or self.coordinators:
            words += ["--coordinator", address] if self.coordinators else []
        selector = chosen().selector
        words += ["--context", selector.context] if selector.context else []
        words += ["--local"] if selector.local else []
        words += ["--extend"] if self.extend else []
        if self.tls_dir is not None:
            words += ["--tls-dir", str(self.tls_dir)]
        if self.workers is not None:
            words += ["--workers", str(self.workers)]
        if resume:
            words += ["--continue"] if "--resume" in words else ["--resume", resume]
        return shlex.join(words)

"""The live page beside a coordinator, in a process of its own.

The coordinator starts `python -m rollout.ui.child` and writes one JSON line to its stdin, a `Start`; it answers with
one on stdout: `{"url": ...}` once the page answers, or `{"fault": ...}`. It ends when stdin closes, so it never
outlives its coordinator. Logs go to stderr.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import structlog
from pydantic import BaseModel

from rollout.client.target import Target
from rollout.config.logging import configure
from rollout.config.settings import LoggingSection
from rollout.model.errors import RolloutError
from rollout.processes.lifeline import end_with_stdin
from rollout.ui.serving import Place, serve

log = structlog.get_logger()
_END_S = 3.0


class Start(BaseModel):
    """`addresses`: coordinators; `tls_dir`: a directory whose authority issues this process's operator certificate."""

    addresses: list[str]
    tls_dir: Path
    cluster: str
    place: Place
    logging: LoggingSection


def _answer(**fields: str) -> None:
    assert sys.__stdout__ is not None
    sys.__stdout__.write(json.dumps(fields) + "\n")
    sys.__stdout__.flush()


async def _serve(start: Start) -> None:
    target = Target(start.addresses, start.tls_dir, start.cluster, explicit=True)
    await serve(target, start.place, lambda text: log.debug("page_says", text=text), lambda url: _answer(url=url))


async def _main(start: Start) -> None:
    serving = asyncio.create_task(_serve(start))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)
    end_with_stdin(_END_S)
    try:
        await serving
    except asyncio.CancelledError:
        pass
    except RolloutError as error:
        _answer(fault=error.message)
        raise SystemExit(2) from None


def main() -> None:
    sys.stdout = sys.stderr  # what the package of a workload prints is no answer, and nobody reads it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; the coordinator closes stdin
    line = sys.stdin.buffer.readline()
    if line:
        start = Start.model_validate_json(line)
        configure(start.logging, stream=sys.stderr)
        asyncio.run(_main(start))


if __name__ == "__main__":
    main()

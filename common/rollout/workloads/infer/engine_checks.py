"""Checks of an engine before anything starts, for all workloads that use one."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec

from rollout.config.adapters import find_adapter
from rollout.model.errors import ConfigError, InputError, RolloutError
from rollout.model.problems import problems
from rollout.workloads.engine_options import installed_vllm_options, unknown_options
from rollout.workloads.infer.config import SERVER, InferBackend
from rollout.workloads.sections import BackendSection

_PACKAGE = {"vllm": "vllm", "transformers": "transformers", SERVER: "aiohttp"}


class Gathered:
    """Collects the faults of several checks, to raise them together."""

    def __init__(self) -> None:
        self._faults: list[RolloutError] = []

    @contextmanager
    def checking(self) -> Generator[None]:
        """Collect the faults that the block raises, so that the next check can run."""
        try:
            yield
        except (ConfigError, InputError) as error:
            self._faults.append(error)

    def raise_all(self) -> None:
        """Raise ConfigError with all faults; a single fault is raised unchanged."""
        if len(self._faults) == 1:
            raise self._faults[0]
        if self._faults:
            raise ConfigError(problems(fault.message for fault in self._faults))


def check_backend(backend: BackendSection, gathered: Gathered, *, here: bool) -> None:
    """Check a backend: only its name, unless workers start `here`, because other hosts may have what this one lacks."""
    with gathered.checking():
        find_adapter("rollout.backends", backend.kind, "backend.kind")
    with gathered.checking():
        if here:
            check_options(backend, "backend.engine")


def check_package(kind: str, key: str, what: str) -> None:
    """Raise ConfigError if this host lacks the engine of that kind. `key` is the setting that names it, `what` says
    what can be sent elsewhere instead."""
    package = _PACKAGE.get(kind)
    if package and find_spec(package) is None:
        raise ConfigError(
            f'{key}: "{kind}" needs the Python package {package}, which this host lacks: pip install '
            f'"rollout-engine[{kind}]", or send the {what} to a cluster that has it: --coordinator HOST:PORT'
        )


def check_options(backend: BackendSection, key: str) -> None:
    """Raise ConfigError if this host's vLLM, which the workers will use, lacks some of the arguments under `key`."""
    if backend.kind == "vllm" and backend.engine and (known := installed_vllm_options()):
        faults = [f"{key}.{name}: {why}" for name, why in unknown_options(backend.engine, known)]
        if faults:
            raise ConfigError(problems(faults))


def check_host(backend: InferBackend, what: str) -> None:
    """Raise ConfigError if this host, where workers will start, lacks the engine's package or API key. `what` is that
    of `check_package`."""
    check_package(backend.kind, "backend.kind", what)
    key = backend.api_key_env
    if key and not os.environ.get(key):
        raise ConfigError(
            f"backend.api_key_env: the environment variable {key} is not set, and the workers of this command "
            f"would have no key: export {key}=..., then repeat the command"
        )

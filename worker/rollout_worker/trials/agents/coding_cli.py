"""An agent that is a coding CLI: installed into the sandbox, run once without a user, its tokens counted."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from blake3 import blake3
from rollout.config.scratch import Scratch
from rollout.workloads.job.agent_kinds import CodingCliKwargs
from rollout.workloads.json_form import canonical

from rollout_worker.sandboxes.errors import SandboxError, SandboxFileError
from rollout_worker.sandboxes.port import Finished
from rollout_worker.trials.agents.api_faults import fault_in_text
from rollout_worker.trials.agents.cli_usage import Read
from rollout_worker.trials.agents.coding_clis import Asked, CodingCli
from rollout_worker.trials.agents.install_cache import InstallCache, default_cache
from rollout_worker.trials.agents.install_script import install_script, prefix_of
from rollout_worker.trials.agents.plain import last_words
from rollout_worker.trials.port import Agent, Place, TrialFault

LOGS = "/logs/agent"
_PACKED = "/tmp/.rollout-agent.tar"
_STATUS = "/tmp/.rollout-agent-status"
_VERSION = re.compile(r"\d+(?:\.\d+)+(?:[\w.+-]*\w)?")
_NO_KEY = "none"
"""Stands for the key of a `base_url` that needs none, without which programs refuse to start."""


class Asker(Protocol):
    """The parts of a place that say which service a program uses."""

    @property
    def env(self) -> Mapping[str, str]: ...

    @property
    def model_name(self) -> str | None: ...

    @property
    def base_url(self) -> str | None: ...


class CodingCliAgent(Agent):
    def __init__(self, cli: CodingCli, kwargs: CodingCliKwargs, cache: InstallCache | None = None) -> None:
        self.version = ""
        self._cli = cli
        self._kwargs = kwargs
        self._cache = cache or default_cache()
        self._prefix = prefix_of(cli)

    # ---- installation

    async def install(self, place: Place) -> None:
        """Use what the image has, if its version matches; else the bundle; else the cache; else install it anew."""
        self.environment(place)  # a key that is missing is told before minutes go by
        if await self._is_there(place):
            return
        if self._kwargs.bundle is not None:
            await self._unpack(place, Path(self._kwargs.bundle))
            if not await self._is_there(place):
                raise self._fault(f"the bundle {self._kwargs.bundle} holds no {self._cli.program} that runs here")
            return
        script = install_script(self._cli, self._kwargs.version)
        if not self._kwargs.cache:
            await self._run_script(place, script)
            return
        key = self._key(place, script)

        async def make(path: Path) -> bool:
            await self._run_script(place, script)
            return await self._pack(place, path)

        kept = await self._cache.get_or_make(key, make)
        if kept is None:
            return
        await self._unpack(place, kept)
        if not await self._is_there(place):
            place.note(f"the installation of {self._cli.name} kept on this worker does not run: it is made anew")
            await self._cache.drop(key)
            await self._run_script(place, script)

    def _key(self, place: Place, script: str) -> str:
        version = self._kwargs.version or f"newest of {datetime.now(UTC):%Y-%m-%d}"
        identity = canonical([place.image_key, self._cli.name, version, script])
        return f"{self._cli.name}-{blake3(identity).hexdigest()[:24]}"

    async def _is_there(self, place: Place) -> bool:
        """Return whether it runs in the wanted version, and remember the version."""
        command = f"{self._path()}; {self._cli.program} {shlex.join(self._cli.version_args)} </dev/null"
        finished = await place.run(command, quiet=True)
        found = _VERSION.search(finished.stdout.text()) if finished.ok else None
        wanted = self._kwargs.version
        if found is None or (wanted is not None and found[0] != wanted.removeprefix("v")):
            return False
        self.version = found[0]
        return True

    async def _run_script(self, place: Place, script: str) -> None:
        finished = await place.run(["/bin/sh", "-c", script], user=self._installer(place))
        if not finished.ok:
            raise self._fault(f"{self._cli.name} cannot be installed: {_last(finished)}")
        if not await self._is_there(place):
            raise self._fault(f"{self._cli.name} was installed, and {self._cli.program} --version gives no version")

    async def _pack(self, place: Place, path: Path) -> bool:
        """Return whether its directory was packed to `path`. A failure does no harm: the next trial installs it
        again."""
        command = f"tar -C {self._prefix} -cf {_PACKED} ."
        finished = await place.run(command, user=self._installer(place), quiet=True)
        if not finished.ok:
            place.note(f"the installation of {self._cli.name} cannot be kept: {_last(finished)}")
            return False
        try:
            await place.sandbox.download(_PACKED, path)
        except SandboxFileError as error:
            place.note(f"the installation of {self._cli.name} cannot be kept: {error.message}")
            return False
        finally:
            await place.run(f"rm -f {_PACKED}", user=self._installer(place), quiet=True)
        return True

    async def _unpack(self, place: Place, path: Path) -> None:
        try:
            await place.sandbox.upload(path, _PACKED)
        except OSError as error:
            raise self._fault(f"{path} cannot be read on this worker: {error.strerror or error}") from error
        except SandboxFileError as error:
            raise self._fault(f"{path} cannot be copied into the sandbox: {error.message}") from error
        prefix = shlex.quote(self._prefix)
        command = f"mkdir -p {prefix} && tar -C {prefix} -xof {_PACKED} && rm -f {_PACKED}"
        finished = await place.run(command, user=self._installer(place), quiet=True)
        if not finished.ok:
            raise self._fault(f"{path} cannot be unpacked in the sandbox: {_last(finished)}")

    def _installer(self, place: Place) -> str | None:
        """Return who installs: an image without a program for downloads needs root, even if the agent is not root."""
        return "root" if place.sandbox.capabilities.users else None

    def _fault(self, message: str) -> TrialFault:
        return TrialFault("agent_install_failed", message)

    def _path(self) -> str:
        return f'PATH="{self._prefix}/bin:$PATH"; export PATH'

    # ---- work

    async def execute(self, place: Place, instruction: str) -> None:
        env = self.environment(place)
        log = f"{LOGS}/{self._cli.name}.txt"
        file = f"{self._prefix}/instruction.md"
        await place.sandbox.write_file(file, instruction.encode())
        try:
            finished = await place.run(["/bin/sh", "-c", self._script(place, file, log)], env=env)
        finally:  # also when time has run out
            read = await self._count(place, log)
        if read.refused:
            raise TrialFault("agent_refused", f"{self._cli.name}: the model refused")
        if not finished.ok or read.error:
            raise self._failed(finished, read)

    def _script(self, place: Place, file: str, log: str) -> str:
        """Return a script whose output goes to the trial's log as it comes, and to a file from which tokens are read.
        Its exit code is the program's, not that of tee, and it needs only /bin/sh."""
        cli, asked = self._cli, self._asked(place)
        output = f"{LOGS}/{cli.output}"
        words = [cli.program, *cli.args]
        words += cli.model_args if asked.model else ()
        words += cli.base_url_args if asked.base_url else ()
        words = [word.format(model=asked.model, base_url=asked.base_url, output=output) if "{" in word else word
                 for word in words]  # fmt: skip
        line = shlex.join([*words, *self._kwargs.args, *cli.before_instruction])
        if cli.instruction == "stdin":
            line += f" <{file}"
        else:
            line += f' "$(cat {file})" </dev/null' if cli.instruction == "argument" else f" {file} </dev/null"
        lines = (
            self._path(),
            cli.prepare,
            f"mkdir -p {LOGS}",
            f"rm -f {_STATUS}",
            f"{{ {line}; echo $? >{_STATUS}; }} | tee {log}",
            f"exit $(cat {_STATUS})",
        )
        return "\n".join(one for one in lines if one)

    def _asked(self, place: Asker) -> Asked:
        name = place.model_name or ""
        provider, _, rest = name.partition("/")
        names = self._keys(provider)
        if rest and provider in self._cli.own_providers:
            return Asked(rest, provider, place.base_url or "", names[0])
        return Asked(name, provider if rest else "openai", place.base_url or "", names[0])

    def _keys(self, provider: str) -> tuple[str, ...]:
        keys = self._cli.keys
        return keys.get("") or keys.get(provider) or (f"{provider.upper().replace('-', '_')}_API_KEY",)

    def environment(self, place: Asker) -> Mapping[str, str]:
        """Return the program's variables, besides the agent's own. Raises TrialFault if there is no key."""
        asked = self._asked(place)
        env = {**self._cli.env, **self._cli.more_env(asked)}
        names = self._keys(asked.provider)
        given = self._kwargs.api_key_env
        if given is not None:
            key = place.env.get(given) or os.environ.get(given)
            if not key:
                raise TrialFault("agent_authentication_failed", f"{given} is set neither in env nor on this worker")
            env[names[0]] = key
        elif other := next((place.env[name] for name in self._cli.also_keys if place.env.get(name)), ""):
            env[names[0]] = other
        elif not any(place.env.get(name) for name in names):
            if not asked.base_url:
                need = f"env: {{{names[0]}: ${{{names[0]}}}}}"
                raise TrialFault("agent_authentication_failed", f"{self._cli.name} has no key: add {need} to the agent")
            env[names[0]] = _NO_KEY
        return {name: value for name, value in env.items() if name not in place.env}

    async def _count(self, place: Place, log: str) -> Read:
        """Add the tokens that the program reported to the trial's."""
        source = f"{LOGS}/{self._cli.output}" if self._cli.output else log
        read = Read(())
        with Scratch("rollout-agent-") as directory, suppress(SandboxError):
            path = Path(directory, "printed")
            await place.sandbox.download(source, path)
            read = await asyncio.to_thread(_read, self._cli, path)
        usage = read.usage
        price = self._kwargs.price
        if usage.cost_usd is None and price is not None:
            usage.cost_usd = price.of(usage.input_tokens, usage.cached_tokens, usage.output_tokens)
        place.usage.add(usage)
        return read

    def _failed(self, finished: Finished, read: Read) -> TrialFault:
        """Return the fault. Only the program's own errors are considered: what its tools printed says nothing of the
        service."""
        said = read.error or finished.stderr.text()[-4000:]
        kind = fault_in_text(said) or "agent_execution_failed"
        why = read.error[:1000] or _last(finished)
        return TrialFault(kind, f"{self._cli.name}: {why}")


def _read(cli: CodingCli, path: Path) -> Read:
    if not path.is_file():
        return Read(())
    with path.open(encoding="utf-8", errors="replace") as file:
        read = Read(file)
        cli.read(read)
    return read


def _last(finished: Finished) -> str:
    how = {
        "exited": f"exit code {finished.exit_code}",
        "signalled": f"signal {finished.signal}",
        "timed_out": "out of time",
    }[finished.how]
    text = last_words(finished, 800)
    return f"{how}: {text}" if text else how

"""Coding command lines: programs that print what the real ones printed, and installations that are kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import cli_recordings as said
import pytest
from agent_place import TestPlace, place
from cli_recordings import lines
from rollout.workloads.job.agent_kinds import KINDS, CodingCliKwargs
from rollout.workloads.job.config import AgentSection
from rollout_worker.trials.agents import coding_cli, make_agent
from rollout_worker.trials.agents.cli_usage import Read
from rollout_worker.trials.agents.coding_cli import CodingCliAgent
from rollout_worker.trials.agents.coding_clis import CLIS
from rollout_worker.trials.agents.install_cache import InstallCache
from rollout_worker.trials.agents.install_script import install_script
from rollout_worker.trials.port import TrialFault

VERSION = "1.2.3"
INSTRUCTION = 'Say done.\nIt\'s "two" lines, $HOME.'
FAKE = r"""#!/bin/sh
case " $* " in *" --version "* | *" --help "*) echo "the program {version}. (x)"; exit ;; esac
printf '%s\n' "$@" > /app/args
cat > /app/stdin
env > /app/env
for one; do [ -f "$one" ] && cat "$one" > /app/file; done
[ -f /app/traj ] && cp /app/traj /logs/agent/mini-swe-agent.traj.json
cat /app/printed
{then}
"""


async def put(here: TestPlace, name: str, printed: str, *, then: str = "exit 0", version: str = VERSION) -> None:
    """The program, as an image might bring it, in its PATH."""
    script = FAKE.replace("{then}", then).replace("{version}", version)
    await here.sandbox.write_file(f"/app/bin/{CLIS[name].program}", script.encode(), mode=0o755)
    await here.sandbox.write_file("/app/traj" if name == "mini-swe-agent" else "/app/printed", printed.encode())
    if name == "mini-swe-agent":
        await here.sandbox.write_file("/app/printed", b"working")


@asynccontextmanager
async def ready(tmp_path: Path, name: str, printed: str, **more: Any) -> AsyncGenerator[TestPlace]:
    program = {key: more.pop(key) for key in ("then", "version") if key in more}
    env = {"PATH": "/app/bin:/usr/bin:/bin", **more.pop("env", {})}
    async with place(tmp_path, env=env, **more) as here:
        await put(here, name, printed, **program)
        yield here


async def run(name: str, here: TestPlace, **kwargs: Any) -> str:
    """The version."""
    agent = make_agent(AgentSection(name=name, kwargs=kwargs))
    await agent.install(here)
    await agent.execute(here, INSTRUCTION)
    return agent.version


@pytest.mark.parametrize(
    ("name", "model", "key", "printed", "expected"),
    [
        ("claude-code", "anthropic/m", "ANTHROPIC_API_KEY", lines(said.CLAUDE_MESSAGE, said.CLAUDE_RESULT), (18, 4, 7, 0.00015045)),
        ("codex", "openai/m", "CODEX_API_KEY", lines(said.CODEX_RETRIED, said.CODEX_USAGE, said.CODEX_USAGE), (42, 12, 18, None)),
        ("gemini-cli", "google/m", "GEMINI_API_KEY", lines(said.GEMINI_RESULT), (41, 13, 15, None)),
        ("qwen-code", "m", "OPENAI_API_KEY", lines(said.QWEN_MESSAGE, said.QWEN_RESULT), (62, 24, 16, None)),
        ("opencode", "anthropic/m", "ANTHROPIC_API_KEY", lines(said.OPENCODE_STEP, said.OPENCODE_STEP), (62, 24, 16, None)),
        ("aider", "openai/m", "OPENAI_API_KEY", said.AIDER, (2531, 1100, 308, 0.01)),
        ("goose", "anthropic/m", "ANTHROPIC_API_KEY", lines(said.GOOSE), (50, 20, 10, 0.002)),
        ("mini-swe-agent", "openai/m", "OPENAI_API_KEY", json.dumps(said.MINI), (31, 12, 8, 0.5)),
        ("openhands", "openai/m", "LLM_API_KEY", lines(said.OPENHANDS), (31, 12, 8, None)),
    ],
)  # fmt: skip
async def test_a_program_is_told_its_task_model_and_key_and_its_tokens_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, model: str, key: str, printed: str, expected: Any
) -> None:
    monkeypatch.setenv("KEY_OF_THE_WORKER", "s3cret")
    async with ready(tmp_path, name, printed, model_name=model) as here:
        assert await run(name, here, api_key_env="KEY_OF_THE_WORKER", args=["--more", "a b"]) == VERSION
        args, env, stdin = [(await here.sandbox.read_file(f"/app/{one}")).decode() for one in ("args", "env", "stdin")]
        told = stdin or args
        if CLIS[name].instruction == "file":
            told = (await here.sandbox.read_file("/app/file")).decode()
        usage = here.usage
    assert INSTRUCTION in told
    assert f"\n{key}=s3cret\n" in f"\n{env}"
    assert "KEY_OF_THE_WORKER" not in env
    assert "\nm\n" in args or f"\n{model}\n" in args or "_MODEL=" in env
    assert "--more\na b\n" in args
    assert (usage.input_tokens, usage.cached_tokens, usage.output_tokens) == expected[:3]
    assert usage.cost_usd == (None if expected[3] is None else pytest.approx(expected[3]))


@pytest.mark.parametrize(
    ("name", "model", "printed", "then", "expected"),
    [
        ("claude-code", None, lines(said.CLAUDE_RESULT | {"is_error": True, "result": "Invalid API key · Please run /login"}), "exit 1", "agent_authentication_failed"),
        ("claude-code", None, lines(said.CLAUDE_RESULT | {"is_error": True, "result": "Credit balance is too low"}), "exit 1", "api_usage_limit"),
        ("claude-code", None, lines(said.CLAUDE_RESULT | {"is_error": True, "result": "API Error: 529 {\"type\":\"overloaded_error\"}"}), "exit 1", "api_overloaded"),
        ("claude-code", None, lines(said.CLAUDE_RESULT | {"is_error": True, "result": "Prompt is too long"}), "exit 1", "agent_context_window_exceeded"),
        ("codex", None, lines(said.CODEX_RETRIED, said.CODEX_FAILED), "exit 1", "agent_authentication_failed"),
        ("gemini-cli", None, lines(said.GEMINI_FAILED), "exit 1", "agent_authentication_failed"),
        ("qwen-code", "m", lines(said.QWEN_FAILED), "exit 1", "agent_authentication_failed"),
        ("opencode", "openai/m", lines(said.OPENCODE_FAILED), "exit 0", "agent_authentication_failed"),
        ("aider", "openai/m", said.AIDER_FAILED, "exit 0", "agent_authentication_failed"),
        ("goose", "openai/m", lines({"type": "error", "error": "Rate limit exceeded"}), "exit 0", "api_rate_limited"),
        ("codex", None, "", "echo 'error sending request for url' >&2; exit 1", "api_unreachable"),
        ("codex", None, lines({"type": "item.completed", "item": {"text": "HTTP 401 Unauthorized"}}), "exit 7", "agent_execution_failed"),
        ("codex", None, "", "echo 'read 429 lines of 503 files' >&2; exit 7", "agent_execution_failed"),
    ],
)  # fmt: skip
async def test_what_a_program_says_of_the_service_has_a_type(
    tmp_path: Path, name: str, model: str | None, printed: str, then: str, expected: str
) -> None:
    base_url = "http://127.0.0.1:9/v1"
    async with ready(tmp_path, name, printed, then=then, model_name=model, base_url=base_url) as here:
        with pytest.raises(TrialFault) as caught:
            await run(name, here)
        assert caught.value.type == expected


async def test_tokens_of_messages_count_when_time_runs_out(tmp_path: Path) -> None:
    second = {**said.CLAUDE_MESSAGE, "message": {**said.CLAUDE_MESSAGE["message"], "id": "msg_2"}}
    printed = lines(said.CLAUDE_MESSAGE, said.CLAUDE_MESSAGE, second)
    then = "touch /app/there; sleep 600"
    async with ready(tmp_path, "claude-code", printed, then=then, env={"ANTHROPIC_API_KEY": "x"}) as here:
        agent = make_agent(AgentSection(name="claude-code", kwargs={"price": {"input": 1.0, "output": 1.0}}))
        await agent.install(here)
        running = asyncio.create_task(agent.execute(here, INSTRUCTION))
        while not (await here.sandbox.exec("test -e /app/there")).ok:
            assert not running.done()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert (here.usage.input_tokens, here.usage.cached_tokens, here.usage.output_tokens) == (36, 8, 2)
        assert here.usage.cost_usd == pytest.approx(38e-6)


async def test_a_program_without_a_key_is_told_before_it_is_installed(tmp_path: Path) -> None:
    async with place(tmp_path) as here:
        with pytest.raises(
            TrialFault, match=r"codex has no key: add env: {CODEX_API_KEY: \${CODEX_API_KEY}}"
        ) as caught:
            await make_agent(AgentSection(name="codex")).install(here)
        assert (caught.value.type, here.ran) == ("agent_authentication_failed", [])


async def test_the_key_that_people_have_for_openai_is_codex_s_too(tmp_path: Path) -> None:
    async with ready(tmp_path, "codex", lines(said.CODEX_USAGE), env={"OPENAI_API_KEY": "k"}) as here:
        await run("codex", here)
        assert b"\nCODEX_API_KEY=k\n" in b"\n" + await here.sandbox.read_file("/app/env")


@pytest.mark.parametrize(
    ("name", "model", "expected"),
    [
        ("claude-code", "anthropic/m", "ANTHROPIC_BASE_URL=http://h/v1"),
        ("gemini-cli", "m", "GOOGLE_GEMINI_BASE_URL=http://h/v1"),
        ("qwen-code", "m", "OPENAI_BASE_URL=http://h/v1"),
        ("aider", "anthropic/m", "ANTHROPIC_API_BASE=http://h/v1"),
        ("aider", "openai/m", "OPENAI_API_BASE=http://h/v1"),
        ("goose", "openai/m", "OPENAI_HOST=http://h"),
        ("openhands", "openai/m", "LLM_BASE_URL=http://h/v1"),
        ("codex", "m", 'base_url="http://h/v1"'),
        ("mini-swe-agent", "openai/m", "model.model_kwargs.api_base=http://h/v1"),
        ("opencode", "local/m", '"baseURL": "http://h/v1", "apiKey": "{env:LOCAL_API_KEY}"}, "models": {"m": {}}'),
    ],
)
async def test_a_base_url_is_told_and_needs_no_key(tmp_path: Path, name: str, model: str, expected: str) -> None:
    async with ready(tmp_path, name, "{}", model_name=model, base_url="http://h/v1") as here:
        await run(name, here)
        assert expected.encode() in await here.sandbox.read_file("/app/env") + await here.sandbox.read_file("/app/args")


def test_every_program_of_the_table_is_known_by_name() -> None:
    assert set(CLIS) == {name for name, kind in KINDS.items() if kind.kwargs is CodingCliKwargs}


def test_goose_before_it_split_its_tokens() -> None:
    read = Read(lines(said.GOOSE_OLD).splitlines())
    CLIS["goose"].read(read)
    assert (read.usage.input_tokens, read.usage.output_tokens) == (60, 0)


@pytest.mark.parametrize("name", CLIS)
async def test_installation_scripts_are_shell(tmp_path: Path, name: str) -> None:
    script = install_script(CLIS[name], "1.2.3")
    assert "1.2.3" in script
    process = await asyncio.create_subprocess_exec("sh", "-n", "-c", script)
    assert await process.wait() == 0


# Installations that are kept


class Installing:
    """Trials of one program, each in a sandbox of its own, whose installation counts how often it ran."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str = VERSION) -> None:
        self.path = tmp_path
        self.cache = InstallCache(tmp_path / "cache")
        self.cli = replace(CLIS["claude-code"], name="fake", program="fake")
        self.number = self.installed = 0
        prefix = coding_cli.prefix_of(self.cli)
        script = (
            f"mkdir -p {prefix}/bin; ln -s fake-{version} {prefix}/bin/fake; "
            f"printf '#!/bin/sh\\necho {version}\\n' > {prefix}/bin/fake-{version}; chmod +x {prefix}/bin/fake-{version}"
        )
        self.script = script
        monkeypatch.setattr(coding_cli, "install_script", lambda *_: script)

    async def trial(self, **kwargs: Any) -> CodingCliAgent:
        self.number += 1
        directory = self.path / str(self.number)
        directory.mkdir()
        async with place(directory, base_url="http://h", image_key=kwargs.pop("image", "i")) as here:
            agent = CodingCliAgent(self.cli, CodingCliKwargs(**kwargs), self.cache)
            self.place = here
            await agent.install(here)
            self.installed += here.ran.count(["/bin/sh", "-c", self.script])
        return agent

    def kept(self) -> Path:
        (found,) = (self.path / "cache").glob("*.tar")
        return found


async def test_an_installation_is_kept_for_the_next_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = Installing(tmp_path, monkeypatch)
    assert [(await world.trial()).version for _ in range(2)] == [VERSION] * 2
    assert world.installed == 1
    await world.trial(image="another")
    await world.trial(version=VERSION)
    await world.trial(cache=False)
    assert world.installed == 4


async def test_trials_side_by_side_install_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = Installing(tmp_path, monkeypatch)
    await asyncio.gather(*(world.trial() for _ in range(3)))
    assert world.installed == 1


async def test_what_was_kept_and_does_not_run_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = Installing(tmp_path, monkeypatch)
    await world.trial()
    world.kept().write_bytes(bytes(10240))  # an empty archive
    assert (await world.trial()).version == VERSION
    assert world.installed == 2
    assert "does not run: it is made anew" in world.place.said[0]


async def test_a_bundle_is_unpacked_in_place_of_an_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = Installing(tmp_path, monkeypatch)
    await world.trial()
    bundle = world.kept().rename(tmp_path / "bundle.tar")
    assert (await world.trial(bundle=str(bundle))).version == VERSION
    assert world.installed == 1
    for path, expected in (
        (tmp_path / "none.tar", "cannot be read on this worker"),
        (Path(__file__), "cannot be unpacked"),
    ):
        with pytest.raises(TrialFault, match=expected) as caught:
            await world.trial(bundle=str(path))
        assert caught.value.type == "agent_install_failed"


async def test_an_installation_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = Installing(tmp_path, monkeypatch)
    monkeypatch.setattr(coding_cli, "install_script", lambda *_: "echo no such package >&2; exit 4")
    with pytest.raises(TrialFault, match="fake cannot be installed: exit code 4: no such package") as caught:
        await world.trial()
    assert caught.value.type == "agent_install_failed"


async def test_another_version_than_the_image_s_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []

    def script(cli: object, version: str | None) -> str:
        asked.append(version)
        return "exit 4"

    monkeypatch.setattr(coding_cli, "install_script", script)
    async with ready(tmp_path, "codex", "", base_url="http://h") as here:
        agent = CodingCliAgent(CLIS["codex"], CodingCliKwargs(version="9.9"), InstallCache(tmp_path / "cache"))
        with pytest.raises(TrialFault, match="codex cannot be installed"):
            await agent.install(here)
    assert asked == ["9.9"]

"""Agents of jobs: which one a section means, the loop over a model's service, and what its refusals mean."""

from __future__ import annotations

import asyncio
import json
import re
import time
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from agent_place import Answered, TestPlace, completion, place, service
from rollout.config.load import load_settings
from rollout.workloads.job.agent_kinds import KINDS
from rollout.workloads.job.config import AgentSection, JobConfig
from rollout.workloads.job.try_agents import try_agents
from rollout_worker.trials.agents import make_agent
from rollout_worker.trials.agents.chat import ChatEndpoint
from rollout_worker.trials.agents.shell_loop import says_done
from rollout_worker.trials.agents.try_here import try_agent
from rollout_worker.trials.port import Place, Reply, TrialFault

DONE = "TASK_COMPLETE"
PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()


class Own:
    version = "2.0"

    def __init__(self, greeting: str = "hi") -> None:
        self.greeting = greeting

    async def install(self, place: Place) -> None: ...

    async def execute(self, place: Place, instruction: str) -> None:
        await place.run(f"echo {self.greeting} > out")


class Lacking:
    version = 3

    def install(self, place: Place) -> None: ...

    async def execute(self, place: Place) -> None: ...


def loop(**kwargs: Any) -> AgentSection:
    return AgentSection(name="shell-loop", kwargs=kwargs)


async def run(section: AgentSection, place: TestPlace, instruction: str = "Write hello.") -> None:
    agent = make_agent(section)
    await agent.install(place)
    await agent.execute(place, instruction)


# Which agent a section means


async def test_a_class_is_made_with_its_kwargs(tmp_path: Path) -> None:
    async with place(tmp_path) as here:
        await run(AgentSection(import_path=f"{__name__}:Own", kwargs={"greeting": "moin"}), here)
        assert await here.sandbox.read_file("/app/out") == b"moin\n"


async def test_a_package_brings_an_agent_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = tmp_path / "own_agents-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own_agents\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[rollout.agents]\nown = {__name__}:Own\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert isinstance(make_agent(AgentSection(name="own")), Own)
    with pytest.raises(ValueError, match=r'"onw" is no agent: .* did you mean "own"'):
        AgentSection(name="onw")


@pytest.mark.parametrize(
    ("path", "kwargs", "expected"),
    [
        ("no_such_module:Agent", {}, "no_such_module:Agent cannot be imported on this worker: ModuleNotFoundError"),
        (f"{__name__}:Nothing", {}, "has no Nothing"),
        (f"{__name__}:DONE", {}, "is no class, but a str"),
        (f"{__name__}:Own", {"greetings": 1}, r"cannot be made with its kwargs \(greetings\): TypeError"),
        (f"{__name__}:Lacking", {}, "it needs an attribute version.*it needs async def install.*execute must be async"),
    ],
)
def test_what_is_no_agent_is_told(path: str, kwargs: dict[str, Any], expected: str) -> None:
    with pytest.raises(TrialFault, match=expected) as caught:
        make_agent(AgentSection(import_path=path, kwargs=kwargs))
    assert caught.value.type == "agent_install_failed"


async def test_bash_of_the_job(tmp_path: Path) -> None:
    async with place(tmp_path, env={"WHO": "me"}) as here:
        await run(AgentSection(name="claude-code", install="echo $WHO > a", execute="cat a > b"), here)
        assert await here.sandbox.read_file("/app/b") == b"me\n"
        with pytest.raises(TrialFault, match=r"install.* ended with exit code 3: no") as caught:
            await run(AgentSection(name="mine", install="echo no >&2; exit 3", execute="x"), here)
        assert caught.value.type == "agent_install_failed"
        with pytest.raises(TrialFault) as caught:
            await run(AgentSection(name="mine", execute="exit 1"), here)
        assert caught.value.type == "agent_execution_failed"


async def test_nop_does_nothing(tmp_path: Path) -> None:
    async with place(tmp_path) as here:
        await run(AgentSection(name="nop"), here)
        assert here.ran == []


# The loop


async def test_blocks_run_one_after_another_and_the_model_sees_them(tmp_path: Path) -> None:
    first = "So:\n```bash\ncd /tmp; echo one > /app/f; echo seen; echo bad >&2; false\n```\n```sh\npwd; cat f\n```"
    async with service(first, f"Done.\n{DONE}") as served, place(tmp_path, base_url=served.url, model_name="m") as here:
        await run(loop(), here)
        assert served.requests[0][1]["model"] == "m"
        assert "authorization" not in served.requests[0][0]
        roles = [message["role"] for message in served.requests[1][1]["messages"]]
        assert roles == ["system", "user", "assistant", "user"]
        seen = served.requests[1][1]["messages"][-1]["content"]
        assert seen == "Block 1 of 2: exit code 1\nseen\nbad\n\nBlock 2 of 2: exit code 0\n/app\none"
        assert (here.usage.input_tokens, here.usage.output_tokens, here.usage.cost_usd) == (20, 10, None)


async def test_the_trajectory_is_kept(tmp_path: Path) -> None:
    answers = ("```bash\necho x\n```", DONE)
    async with service(*answers) as served, place(tmp_path, base_url=served.url, model_name="m") as here:
        await run(loop(price={"input": 1.0, "output": 2.0}), here)
        found = await here.trajectory()
    assert (found["schema_version"], found["agent"]["name"], found["agent"]["model_name"]) == (
        "ATIF-v1.7",
        "shell-loop",
        "m",
    )
    assert [(step["step_id"], step["source"]) for step in found["steps"]] == [
        (1, "system"), (2, "user"), (3, "agent"), (4, "agent"),
    ]  # fmt: skip
    acted = found["steps"][2]
    assert acted["tool_calls"][0]["arguments"] == {"command": "echo x\n"}
    assert acted["observation"]["results"] == [
        {"source_call_id": acted["tool_calls"][0]["tool_call_id"], "content": "exit code 0\nx"}
    ]
    assert acted["metrics"] == {"prompt_tokens": 10, "completion_tokens": 5, "cost_usd": 2e-05}
    assert found["final_metrics"]["total_cost_usd"] == pytest.approx(4e-05)


async def test_usage_and_trajectory_when_time_runs_out(tmp_path: Path) -> None:
    usage = {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 60}, "completion_tokens": 7}
    answers = (completion("```bash\necho x\n```", usage=usage), Answered("", never=True))
    async with service(*answers) as served, place(tmp_path, base_url=served.url, model_name="m") as here:
        price = {"input": 10.0, "cached": 1.0, "output": 100.0}
        running = asyncio.create_task(run(loop(price=price), here))
        while len(served.requests) < 2:
            served.asked.clear()
            await served.asked.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert (here.usage.input_tokens, here.usage.cached_tokens, here.usage.output_tokens) == (100, 60, 7)
        assert here.usage.cost_usd == pytest.approx((40 * 10 + 60 * 1 + 7 * 100) / 1e6)
        steps = (await here.trajectory())["steps"]
        assert steps[-1]["observation"]["results"][0]["content"] == "exit code 0\nx"


async def test_a_block_has_a_time_limit_and_its_output_is_cut(tmp_path: Path) -> None:
    answers = ("```bash\nseq 1 2000; sleep 60\n```", DONE)
    async with service(*answers) as served, place(tmp_path, base_url=served.url, model_name="m") as here:
        await run(loop(command_timeout_sec=0.3, max_output_bytes=100), here)
        seen = served.requests[1][1]["messages"][-1]["content"]
    assert seen.startswith("Block 1 of 1: ended after 0 s, because it took too long\n1\n2\n")
    assert "[... 8793 bytes left out ...]" in seen
    assert seen.endswith("\n1999\n2000")


async def test_done_counts_only_when_its_blocks_ended_well(tmp_path: Path) -> None:
    answers = (f"```bash\nfalse\n```\n{DONE}", f"```bash\ntrue\n```\n{DONE}")
    async with service(*answers) as served, place(tmp_path, base_url=served.url, model_name="m") as here:
        await run(loop(), here)
        assert len(served.requests) == 2


@pytest.mark.parametrize(
    ("text", "done"),
    [
        (DONE, True),
        (f"I am done.\n**{DONE}**\n", True),
        (f"Then I will write {DONE}.", False),
        (f"```bash\necho\n{DONE}\n```", False),
        (f"```text\n{DONE}\n```", False),
        (f"```bash\ncut\n{DONE}", False),
    ],
)
def test_the_marker_stands_alone_and_outside_of_blocks(text: str, done: bool) -> None:
    assert says_done(text) is done


async def test_limits_of_turns_tokens_and_patience(tmp_path: Path) -> None:
    act = "```bash\ntrue\n```"
    for kwargs, answers, expected in (
        ({"max_turns": 2}, (act, act), "ended after max_turns, 2"),
        ({"max_total_tokens": 30}, (act, act), "after 30 tokens, of max_total_tokens 30"),
        ({}, ("hm", "hm", "hm"), "3 answers in a row ran nothing"),
    ):
        async with service(*answers) as served, place(tmp_path, base_url=served.url, model_name="m") as here:
            await run(loop(**kwargs), here)
            assert expected in here.said[0]
            assert len(served.requests) == len(answers)


async def test_a_cut_answer_is_not_run_and_a_second_one_ends_the_trial(tmp_path: Path) -> None:
    cut = completion("```bash\necho x > f\n```\n```bash\nrm -rf", "length")
    async with service(cut, cut) as served, place(tmp_path, base_url=served.url, model_name="m") as here:
        with pytest.raises(TrialFault, match="two answers in a row were cut off") as caught:
            await run(loop(), here)
        assert caught.value.type == "agent_output_tokens_exceeded"
        assert "too long, and nothing of it was run" in served.requests[1][1]["messages"][-1]["content"]
        assert (here.usage.output_tokens, len(here.ran)) == (10, 1)  # the look at the shell


async def test_a_step_goes_on_with_the_conversation(tmp_path: Path) -> None:
    async with service(DONE, DONE) as served, place(tmp_path, base_url=served.url, model_name="m") as here:
        agent = make_agent(loop())
        await agent.install(here)
        await agent.execute(here, "first")
        await agent.execute(here, "second")
        said = [message["content"] for message in served.requests[1][1]["messages"]]
        assert said[1:] == ["first", DONE, "second"]
        assert len((await here.trajectory())["steps"]) == 5


async def test_the_agent_is_told_its_deadline(tmp_path: Path) -> None:
    deadline = time.time() + 600
    async with service(DONE) as served, place(tmp_path, base_url=served.url, model_name="m", deadline=deadline) as here:
        await run(loop(), here)
        assert served.requests[0][1]["messages"][1]["content"].endswith("You have 10 minutes for it.")


async def test_a_long_block_is_run_from_a_file(tmp_path: Path) -> None:
    answers = (f"```bash\ncat > f <<'X'\n{'y' * 200_000}\nX\n```", DONE)
    async with service(*answers) as served, place(tmp_path, base_url=served.url, model_name="m") as here:
        await run(loop(), here)
        assert len(await here.sandbox.read_file("/app/f")) == 200_001


async def test_engines_of_the_cluster_are_asked_without_a_base_url(tmp_path: Path) -> None:
    async with place(tmp_path, answers=[Reply("```bash\necho x > f\n```\n" + DONE, "stop", 9, 3)]) as here:
        await run(loop(temperature=0.0, max_tokens=50), here)
        assert here.asked[0][1] == {"max_tokens": 50, "temperature": 0.0}
        assert (here.usage.input_tokens, here.usage.output_tokens) == (9, 3)


async def test_the_key_is_sent_and_never_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = Answered({"error": {"message": "Incorrect API key provided: s3cret"}}, 401)
    async with service(refused) as served, place(tmp_path, base_url=served.url, model_name="m") as here:
        with pytest.raises(TrialFault, match="MY_KEY is set neither in env nor on this worker") as caught:
            await run(loop(api_key_env="MY_KEY"), here)
        assert caught.value.type == "agent_authentication_failed"
        monkeypatch.setenv("MY_KEY", "s3cret")
        with pytest.raises(TrialFault, match=r"key provided: \*\*\*") as caught:
            await run(loop(api_key_env="MY_KEY"), here)
        assert caught.value.type == "agent_authentication_failed"
        assert served.requests[0][0]["authorization"] == "Bearer s3cret"
        assert all("MY_KEY" not in str(command) for command in here.ran)


# What a refusal of the service means

LONG = "This model's maximum context length is 8192 tokens"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Answered({"error": {"message": "no"}}, 401), "agent_authentication_failed"),
        (Answered({"error": {"message": "no"}}, 403), "agent_authentication_failed"),
        (Answered({"error": {"message": "The model `x` does not exist", "code": "model_not_found"}}, 404), "agent_model_not_found"),
        (Answered({"detail": "Not Found"}, 404), "api_bad_request"),
        (Answered({"error": {"message": LONG, "code": "context_length_exceeded"}}, 400), "agent_context_window_exceeded"),
        (Answered({"object": "error", "message": LONG, "code": 400}, 400), "agent_context_window_exceeded"),
        (Answered({"error": {"message": "temperature is not supported"}}, 400), "api_bad_request"),
        (Answered({"error": {"message": "x", "code": "content_filter"}}, 400), "agent_refused"),
        (Answered({"error": {"message": "You exceeded your current quota", "code": "insufficient_quota"}}, 429), "api_usage_limit"),
        (Answered({"error": "no credits"}, 402), "api_usage_limit"),
        (Answered({"error": {"message": "slow down", "code": "rate_limit_exceeded"}}, 429), "api_rate_limited"),
        (Answered(b"<html>bad gateway</html>", 502), "api_overloaded"),
        (Answered({"error": {"message": "overloaded"}}, 529), "api_overloaded"),
        (Answered(b"hello"), "api_unreachable"),
        (Answered({"choices": []}), "api_unreachable"),
        (Answered({"error": {"message": "upstream"}, "choices": None}), "api_overloaded"),
    ],
)  # fmt: skip
async def test_a_refusal_of_the_service_has_a_type(answer: Answered, expected: str) -> None:
    async with service(answer) as served, ChatEndpoint(served.url, "m", retries=0) as endpoint:
        with pytest.raises(TrialFault) as caught:
            await endpoint.ask([], {})
        assert caught.value.type == expected


async def test_a_model_that_refuses(tmp_path: Path) -> None:
    choice = {"message": {"refusal": "I will not"}, "finish_reason": "stop"}
    answers = ({"choices": [choice], "usage": {"prompt_tokens": 3}}, completion("I cannot", "content_filter"))
    async with service(*answers) as served, place(tmp_path, base_url=served.url, model_name="m") as here:
        for _ in answers:
            with pytest.raises(TrialFault, match="the model refused: I") as caught:
                await run(loop(), here)
            assert caught.value.type == "agent_refused"
        assert here.usage.input_tokens == 13


async def test_nobody_answers_at_the_address(tmp_path: Path) -> None:
    async with place(tmp_path, base_url="http://127.0.0.1:9/v1", model_name="m") as here:
        with pytest.raises(TrialFault, match="/v1/chat/completions") as caught:
            await run(loop(api_retries=1), here)
        assert caught.value.type == "api_unreachable"
        assert [step.split()[0] for step in here.steps] == ["waiting", "agent"]
        with pytest.raises(TrialFault, match="base_url") as caught:
            here.base_url = "ftp://x"
            await run(loop(), here)
        assert caught.value.type == "api_bad_request"


async def test_no_answer_in_time(tmp_path: Path) -> None:
    answers = [Answered("", never=True)]
    async with service(*answers) as served, place(tmp_path, base_url=served.url, model_name="m") as here:
        with pytest.raises(TrialFault, match="no answer in time") as caught:
            await run(loop(api_retries=0, request_timeout_sec=0.1), here)
        assert caught.value.type == "api_unreachable"


async def test_a_request_is_tried_again_when_the_service_says(tmp_path: Path) -> None:
    busy = [
        Answered({"error": "x"}, 503, {"retry-after": "0"}),
        Answered({"error": "x"}, 429, {"retry-after-ms": "1"}),
        Answered({"error": "x"}, 408, {"retry-after": formatdate(usegmt=True)}),
        Answered({"error": "x"}, 409, {"retry-after": "0"}),
    ]
    async with service(*busy, DONE) as served, place(tmp_path, base_url=served.url, model_name="m") as here:
        await run(loop(), here)
        assert len(served.requests) == 5


async def test_a_long_wait_is_left_to_another_try_at_the_trial(tmp_path: Path) -> None:
    busy = Answered({"error": {"message": "slow down"}}, 429, {"retry-after": "90"})
    async with service(busy, busy) as served, place(tmp_path, base_url=served.url, model_name="m") as here:
        with pytest.raises(TrialFault) as caught:
            await run(loop(), here)
        assert (caught.value.type, caught.value.retry_after_s) == ("api_rate_limited", 90.0)
        here.deadline = time.time() + 20
        busy.headers = {"retry-after": "30"}  # which ends after the deadline
        with pytest.raises(TrialFault) as caught:
            await run(loop(), here)
        assert (caught.value.retry_after_s, len(served.requests)) == (30.0, 2)


async def test_tokens_that_nobody_counts_are_told_once(tmp_path: Path) -> None:
    answers = (completion("hm", usage={}), completion(DONE, usage={}))
    async with service(*answers) as served, place(tmp_path, base_url=served.url, model_name="m") as here:
        await run(loop(), here)
        assert here.said == ["the endpoint does not say how many tokens it used: they are not counted"]
        assert (
            json.loads(await here.sandbox.read_file("/logs/agent/trajectory.json"))["final_metrics"]["total_steps"] == 5
        )


# The page of the docs


def test_the_page_names_every_agent_and_kwarg() -> None:
    for kind in KINDS.values():
        assert f"`{kind.name}`" in PAGE
        for key in kind.kwargs.model_fields:
            assert f"`{key}`" in PAGE, f"{kind.name}: {key}"


def test_the_examples_of_the_page_are_jobs(tmp_path: Path) -> None:
    examples = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert len(examples) == 4
    for example in examples:
        path = tmp_path / "job.yaml"
        path.write_text(example + ("" if "agents:" in example else "agents: [{name: shell-loop}]\n"))
        with path.open("a") as file:
            file.write("" if "datasets:" in example else "datasets: [{path: d}]\n")
        load_settings(JobConfig, path, environ={})


async def test_the_agent_of_the_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_agents.py").write_text(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    section = AgentSection(import_path="my_agents:Careful", kwargs={"tries": 2})
    async with place(tmp_path, answers=[Reply("false", "stop", 1, 1), Reply("echo x > f", "stop", 1, 1)]) as here:
        await run(section, here)
        assert await here.sandbox.read_file("/app/f") == b"x\n"


# ---- before a job


@pytest.mark.parametrize(
    ("agent", "told"),
    [
        ({"name": "codex"}, {"key": "env", "warning": "codex has no key: add env: {CODEX_API_KEY"}),
        ({"name": "codex", "env": {"OPENAI_API_KEY": "x"}}, {}),
        ({"name": "codex", "base_url": "http://localhost:1"}, {}),
    ],
)
def test_what_an_agent_lacks_is_known_without_running_it(agent: dict[str, Any], told: dict[str, str]) -> None:
    found = try_agent(AgentSection.model_validate(agent), {})
    assert found.keys() == told.keys()
    assert all(found[key].startswith(text) for key, text in told.items())


@pytest.mark.parametrize(
    ("agent", "told"),
    [
        ({"import_path": "plug:A", "kwargs": {"depth": 1}}, None),
        ({"import_path": "plug:Made", "kwargs": {"any": 1}}, None),
        ({"import_path": "plug:A"}, "kwargs: A needs depth"),
        ({"import_path": "plug:A", "kwargs": {"depth": 1, "width": 2}}, "kwargs: A does not take width"),
        ({"import_path": "plug:B"}, "import_path: "),
        ({"import_path": "plugs:A"}, "import_path: there is no module plugs"),
    ],
)
def test_a_check_of_a_job_imports_no_agent(
    agent: dict[str, Any], told: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import sys\nclass A:\n    def __init__(self, depth): pass\nMade = object()\nsys.exit('imported')\n"
    (tmp_path / "plug.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    job = JobConfig.model_validate({"name": "j", "agents": [agent], "datasets": [{"path": "d"}]})
    faults, warnings = try_agents(job, lambda text: None)
    assert len(faults) == (told is not None) and warnings == []
    assert told is None or faults[0].startswith(f"agents.0.{told}")

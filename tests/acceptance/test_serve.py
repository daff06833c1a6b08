"""`rollout serve` as its clients see it: the real `openai` client, over real processes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil
import pytest
from acceptance_cli import Cli, until
from cluster import Cluster
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
LONG = " ".join(f"word{n}" for n in range(40))


def configure(
    cli: Cli, uri: str = "m", token_ms: float = 0, delay_ms: float = 0, replicas: int = 1, **serve: Any
) -> None:
    cli.config(
        "serve.toml",
        model={"uri": uri},
        backend={"kind": "mock", "token_ms": token_ms, "delay_ms": delay_ms, "replicas": replicas},
        serve={"listen_addr": "127.0.0.1:0", "served_name": "nice", **serve},
        input=None,
        output=None,
    )


def wait_for(process: subprocess.Popen[str], name: str) -> dict[str, Any]:
    """The next event of that name."""
    assert process.stdout is not None
    for line in process.stdout:
        if (event := json.loads(line)).get("event") == name:
            return event
    raise AssertionError(process.communicate())


@contextmanager
def served(cli: Cli, *args: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Its address, once it is ready, and its process."""
    process = cli.start("serve", "--config", "serve.toml", "--json", *args)
    try:
        yield wait_for(process, "ready")["url"], process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


def metric(url: str, name: str) -> float:
    text = httpx2.get(f"{url.removesuffix('/v1')}/metrics").text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"rollout_serve_{name}"))


def test_the_openai_client_sync_and_async(cli: Cli) -> None:
    configure(cli)
    with served(cli) as (url, process):
        with openai.OpenAI(base_url=url, api_key="-") as client:
            assert [model.id for model in client.models.list()] == ["nice", "m"]
            answer = client.chat.completions.create(model="nice", messages=HELLO)
            text = answer.choices[0].message.content
            chunks = client.chat.completions.create(
                model="nice", messages=HELLO, stream=True, stream_options={"include_usage": True}
            )
            seen = list(chunks)
            said = "".join(chunk.choices[0].delta.content or "" for chunk in seen if chunk.choices)
            usage = seen[-1].usage
            assert text and said == text and usage and answer.usage
            assert usage.completion_tokens == answer.usage.completion_tokens
            assert client.embeddings.create(model="nice", input=["a", "b"]).data[1].embedding
            assert client.completions.create(model="nice", prompt="a", n=2).choices[1].text
            with pytest.raises(openai.NotFoundError):
                client.chat.completions.create(model="other", messages=HELLO)
            with pytest.raises(openai.UnprocessableEntityError):
                client.chat.completions.create(model="nice", messages=HELLO, temperature=-1)

        async def many() -> list[str]:
            async with openai.AsyncOpenAI(base_url=url, api_key="-") as client:
                asking = [client.completions.create(model="nice", prompt=f"p{n}", max_tokens=4) for n in range(40)]
                return [answer.choices[0].text for answer in await asyncio.gather(*asking)]

        assert len(set(asyncio.run(many()))) == 40
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


def check_streams_survive(url: str, lose: Callable[[], object]) -> None:
    """Streams have the same text where engines are lost while they run."""
    until(lambda: metric(url, "engines") == 2, "both engines")

    async def ask(client: openai.AsyncOpenAI, prompt: str, text: list[str]) -> None:
        stream = await client.completions.create(model="nice", prompt=prompt, max_tokens=60, stream=True)
        async for chunk in stream:
            text.append(chunk.choices[0].text)

    async def disturbed() -> list[list[str]]:
        texts: list[list[str]] = [[] for _ in range(8)]
        async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as client:
            asking = [asyncio.create_task(ask(client, f"{n} {LONG}", text)) for n, text in enumerate(texts)]
            await asyncio.to_thread(until, lambda: all(len(text) > 3 for text in texts), "first tokens")
            lose()
            await asyncio.gather(*asking)
        return texts

    async def undisturbed() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key="-") as client:
            prompts = [f"{n} {LONG}" for n in range(8)]
            asking = [client.completions.create(model="nice", prompt=one, max_tokens=60) for one in prompts]
            return [answer.choices[0].text for answer in await asyncio.gather(*asking)]

    texts = ["".join(text) for text in asyncio.run(disturbed())]
    answers = asyncio.run(undisturbed())
    assert texts == answers
    assert metric(url, "replays_total") >= 1


@pytest.mark.parametrize("killed", ["rollout_worker", "rollout_coordinator"])
def test_running_streams_survive_a_kill(cli: Cli, killed: str) -> None:
    configure(cli, token_ms=50)
    with served(cli, "--workers", "2") as (url, process):
        check_streams_survive(url, lambda: kill(process, killed))


@pytest.mark.slow
def test_running_streams_survive_one_of_a_workers_engines_that_is_stopped(cli: Cli) -> None:
    configure(cli, token_ms=50, replicas=2)
    with served(cli, "--workers", "1") as (url, process):
        (worker,) = daemons(process, "rollout_worker")
        stopped: list[psutil.Process] = []

        def stop() -> None:
            stopped.append(max(worker.children(), key=lambda one: one.create_time()))
            stopped[0].suspend()

        check_streams_survive(url, stop)
        stopped[0].resume()
        until(lambda: metric(url, "engines") == 2, "both engines again")


def daemons(process: subprocess.Popen[str], package: str) -> list[psutil.Process]:
    return [one for one in psutil.Process(process.pid).children() if package in " ".join(one.cmdline())]


def kill(process: subprocess.Popen[str], package: str) -> None:
    """One of the daemons of the command, with all below it."""
    daemon = daemons(process, package)[0]
    for one in (*daemon.children(recursive=True), daemon):
        os.kill(one.pid, signal.SIGKILL)


def test_another_model_answers_after_sighup_and_no_request_is_dropped(cli: Cli) -> None:
    configure(cli, token_ms=20)
    with served(cli) as (url, process):
        with httpx2.Client(timeout=60) as client:

            def ask(prompt: str) -> str:
                response = client.post(f"{url}/completions", json={"prompt": prompt, "max_tokens": 60})
                assert response.status_code == 200, response.text
                return response.headers["x-rollout-model"]

            before = ask("a")
            configure(cli, uri="n", token_ms=20)
            process.send_signal(signal.SIGHUP)
            models = [ask(LONG)]
            while models[-1] == before:
                models.append(ask(LONG))
            assert client.get(f"{url.removesuffix('/v1')}/health").status_code == 200
        assert wait_for(process, "switched")["model"] == models[-1]


def test_https_and_api_keys_that_are_read_again(cli: Cli) -> None:
    certify(cli.directory)
    keys = cli.directory / "keys.toml"
    cli.env["SERVE_KEYS"] = str(keys)

    def give(key: str) -> None:
        keys.write_text(f'[alice]\nkey = "{key}"\n')
        keys.chmod(0o600)

    give("sk-one")
    configure(cli, api_keys_env="SERVE_KEYS", tls_cert="cert.pem", tls_key="key.pem")
    with served(cli) as (url, process), httpx2.Client(verify=trusting(cli.directory)) as client:

        def status(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return client.post(f"{url}/completions", json={"prompt": "a"}, headers=headers).status_code

        assert url.startswith("https://")
        assert (status("sk-one"), status("sk-two")) == (200, 401)
        give("sk-two")
        process.send_signal(signal.SIGHUP)
        until(lambda: status("sk-two") == 200, "the other key")
        assert status("sk-one") == 401
        configure(
            cli, uri="slow", delay_ms=3_600_000, api_keys_env="SERVE_KEYS", tls_cert="cert.pem", tls_key="key.pem"
        )
        process.send_signal(signal.SIGHUP)
        runs = cli.directory / "serve" / "runs.json"
        until(lambda: len(json.loads(runs.read_text())) == 2, "its run")
        coming = runs.read_text()
        give("sk-three")
        process.send_signal(signal.SIGHUP)
        until(lambda: status("sk-three") == 200, "the third key")
        assert runs.read_text() == coming


def test_a_fault_of_a_configuration_that_is_read_again_has_its_line(cli: Cli) -> None:
    configure(cli)
    with served(cli) as (_, process):
        configure(cli, api_keys_env="NOT_SET")
        process.send_signal(signal.SIGHUP)
        assert re.search(r"serve\.toml:\d+: serve\.api_keys_env: ", wait_for(process, "note")["message"])


def certify(directory: Path) -> None:
    """cert.pem and key.pem of 127.0.0.1, signed by itself."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now = datetime.now(UTC)
    there = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
    certificate = builder.serial_number(1).add_extension(there, critical=True).sign(key, SHA256())
    (directory / "cert.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
    (directory / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def trusting(directory: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(directory / "cert.pem"))


def test_a_switch_without_room_says_what_it_waits_for(cli: Cli, tmp_path: Path) -> None:
    configure(cli)
    with Cluster(tmp_path / ".nodes") as cluster:
        cluster.add_coordinator().wait_event("coordinator_ready")
        cluster.add_worker(worker={"max_engines": 1}).wait_event("worker_ready")
        with served(cli, *cluster.operator()) as (url, process):

            def health() -> dict[str, Any]:
                return httpx2.get(f"{url.removesuffix('/v1')}/health").json()

            assert "coming" not in health()
            configure(cli, uri="n")
            process.send_signal(signal.SIGHUP)
            until(lambda: "no_room" in health().get("coming", {}).get("waits_for", ""), "what is waited for")
            assert httpx2.post(f"{url}/completions", json={"prompt": "a"}).status_code == 200


def test_sighup_is_heard_while_another_model_starts_and_while_the_old_one_ends(cli: Cli) -> None:
    configure(cli, token_ms=20)
    with served(cli) as (url, process), httpx2.Client(timeout=60) as client:
        body = {"prompt": "word " * 5000, "max_tokens": 5000, "stream": True}
        with client.stream("POST", f"{url}/completions", json=body) as answer:
            pieces = answer.iter_bytes()
            next(pieces)
            configure(cli, uri="n")
            process.send_signal(signal.SIGHUP)
            wait_for(process, "switched")
            configure(cli, uri="slow", delay_ms=3_600_000)
            process.send_signal(signal.SIGHUP)
            until(lambda: len(json.loads((cli.directory / "serve" / "runs.json").read_text())) == 3, "its run")
            configure(cli, uri="n", served_name="other")
            process.send_signal(signal.SIGHUP)
            until(lambda: client.get(f"{url}/models").json()["data"][0]["id"] == "other", "the name")


def killed_server(cli: Cli, cluster: Cluster) -> str:
    """The run of a server on a new coordinator and worker that was killed once it was ready."""
    cluster.add_coordinator().wait_event("coordinator_ready")
    cluster.add_worker().wait_event("worker_ready")
    server = cli.start("serve", "--config", "serve.toml", "--json", *cluster.operator())
    run_id = wait_for(server, "ready")["run_id"]
    server.kill()
    server.communicate()
    return run_id


def test_a_server_that_was_killed_goes_on_with_its_engines(cli: Cli, tmp_path: Path) -> None:
    configure(cli)
    with Cluster(tmp_path / ".nodes") as cluster:
        run_id = killed_server(cli, cluster)
        second = cli.start("serve", "--config", "serve.toml", "--json", *cluster.operator())
        assert wait_for(second, "ready")["run_id"] == run_id
        assert cli.run("run", "kill", run_id, *cluster.operator()).code == 0
        assert second.wait(60) == 1  # somebody ended its run
        second.communicate()


def test_the_run_of_a_server_that_does_not_come_back_ends(cli: Cli, tmp_path: Path) -> None:
    configure(cli, orphan_s=1)
    with Cluster(tmp_path / ".nodes") as cluster:
        run_id = killed_server(cli, cluster)

        def state() -> str:
            return json.loads(cli.run("run", "show", run_id, "--json", *cluster.operator()).out)["state"]

        until(lambda: state() == "failed", "the end of the run")
        with served(cli, *cluster.operator()) as (url, _):
            assert httpx2.post(f"{url}/completions", json={"prompt": "a"}).status_code == 200


def test_ctrl_c_finishes_what_runs(cli: Cli) -> None:
    configure(cli, token_ms=20)
    with served(cli) as (url, process):

        async def ask() -> httpx2.Response:
            async with httpx2.AsyncClient(timeout=60) as client:
                body = {"prompt": LONG, "max_tokens": 60}
                asking = asyncio.create_task(client.post(f"{url}/completions", json=body))
                await asyncio.to_thread(until, lambda: metric(url, "in_flight") == 1, "the request")
                process.send_signal(signal.SIGINT)
                return await asking

        assert asyncio.run(ask()).json()["choices"][0]["finish_reason"] == "stop"
        assert process.wait(30) == 0
    assert not cli.left_behind()


def test_every_fault_of_the_configuration_before_anything_starts(cli: Cli) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        configure(cli, listen_addr=f"127.0.0.1:{taken.getsockname()[1]}")
        in_use = cli.run("serve", "--config", "serve.toml")
    configure(cli, listen_addr="nowhere", max_in_flight=0)
    wrong = cli.run("serve", "--config", "serve.toml")
    configure(cli, api_keys_env="NO_SUCH_VARIABLE")
    no_keys = cli.run("serve", "--config", "serve.toml")
    configure(cli, uri="run:nobody")
    absent = cli.run("serve", "--config", "serve.toml")
    assert (in_use.code, wrong.code, no_keys.code, absent.code) == (2, 2, 2, 2)
    assert "'nobody'" in absent.err
    assert "serve.listen_addr" in in_use.err and "serve.api_keys_env" in no_keys.err
    assert all(key in wrong.err for key in ("serve.listen_addr", "serve.max_in_flight"))
    assert not (cli.directory / "serve").exists()

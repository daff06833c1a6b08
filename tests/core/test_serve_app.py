"""The server over replicas that a test plays: status codes, streams, replay, clients that leave, limits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from rollout.workloads.serve.app import application
from rollout.workloads.serve.asks import BODY_MAX
from rollout.workloads.serve.config import ServeConfig
from rollout.workloads.serve.exchange import SILENT_BEATS
from rollout.workloads.serve.frames import EMPTY, Ask, Begin, ChoiceDelta, ChoiceEnd, Deltas, End, Fault, FromReplica
from rollout.workloads.serve.gateway import Gateway, Generation
from rollout.workloads.serve.keys import Keys, read_keys
from rollout.workloads.serve.routing import Replica
from serve_replicas import A, B, Replicas, config_of
from starlette.types import Message

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODY = {"model": "m", "prompt": "Hi", "max_tokens": 4}


def says(*texts: str, end: bool = True) -> Callable[[Replica, Ask], list[FromReplica]]:
    """Each text is a token, whose id is its number."""

    def answer(replica: Replica, ask: Ask) -> list[FromReplica]:
        first = len(ask.so_far[0]) if ask.so_far else 0
        deltas = [Deltas(ask.id, (ChoiceDelta(0, (at,), text),)) for at, text in enumerate(texts[first:], first)]
        last = [End(ask.id, (ChoiceEnd(0, "stop", len(texts)),), 3, len(texts))]
        return [Begin(ask.id, 3), *deltas, *(last if end else [])]

    return answer


def faults(status: int, *, retry: bool = False) -> Callable[[Replica, Ask], list[FromReplica]]:
    return lambda replica, ask: [Fault(ask.id, "code", "no", status, retry)]


AB = says("a", "b")


class Server:
    """The application with the replicas `up`, and a client of it."""

    def __init__(
        self,
        answer: Callable[[Replica, Ask], list[FromReplica]] = AB,
        *up: Replica,
        keys: Keys | None = None,
        **serve: Any,
    ) -> None:
        self.config: ServeConfig = config_of(**serve)
        self.gateway = Gateway(self.config, keys or Keys())
        self.replicas = Replicas(answer)
        exchange = self.replicas.exchange_of(self.config, self.gateway.metrics.replays.inc)
        self.exchange = exchange
        self.gateway.switch(Generation("one", exchange, ready=True))
        for replica in up or (A,):
            exchange.up(replica, str(replica))
        self.app = application(self.gateway)
        self.client = httpx2.AsyncClient(transport=httpx2.ASGITransport(self.app), base_url="http://x")

    async def post(self, body: Any = BODY, url: str = TEXT, **headers: str) -> httpx2.Response:
        return await self.client.post(url, json=body, headers=headers)

    def counted(self, name: str, **labels: str) -> float:
        return self.gateway.metrics.registry.get_sample_value(f"rollout_serve_{name}", labels) or 0

    async def leave(self, body: dict[str, Any]) -> list[Message]:
        """As a client that leaves once the replica has what it asks for."""
        sent: list[Message] = []
        asked = iter([{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}])

        async def receive() -> Message:
            for message in asked:
                return message
            await until(lambda: self.replicas.asked)
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {
            "type": "http", "method": "POST", "path": TEXT, "headers": [], "query_string": b"", "http_version": "1.1",
            "scheme": "http", "server": ("x", 80), "client": None, "root_path": "", "raw_path": TEXT.encode(),
        }  # fmt: skip
        await self.app(scope, receive, send)
        return sent


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def events(response: httpx2.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def text_of(response: httpx2.Response) -> str:
    return "".join(event["choices"][0]["text"] for event in events(response)[:-1])


# ---- answers


async def test_a_request_is_answered_and_counted() -> None:
    server = Server()
    response = await server.post()
    assert (response.status_code, response.json()["choices"][0]["text"]) == (200, "ab")
    assert (response.headers["x-rollout-model"], response.json()["id"][:5]) == ("one", "cmpl-")
    assert server.counted("requests_total", endpoint=TEXT, key="-", status="200") == 1
    assert server.counted("tokens_total", key="-", kind="completion") == 2
    assert server.exchange.in_flight == 0 and server.exchange.router.engines == {str(A): 0}


async def test_a_stream_is_whole() -> None:
    response = await Server().post({**BODY, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert text_of(response) == "ab" and events(response)[-1] == "[DONE]"


async def test_the_clients_request_id_is_kept() -> None:
    assert (await Server().post(**{"x-request-id": "mine-1"})).json()["id"] == "cmpl-mine-1"


async def test_models_health_and_metrics() -> None:
    server = Server()
    models = (await server.client.get("/v1/models")).json()["data"]
    assert [model["id"] for model in models] == ["m", "base"]
    assert (await server.client.get("/v1/models/m")).status_code == 200
    assert (await server.client.get("/health")).status_code == 200
    assert "rollout_serve_engines 1.0" in (await server.client.get("/metrics")).text


async def test_below_the_path_of_a_proxy() -> None:
    server = Server(root_path="/llm")
    assert [(await server.post(url=f"{base}{TEXT}")).status_code for base in ("", "/llm")] == [200, 200]


# ---- refusals


@pytest.mark.parametrize(
    ("url", "body", "status"),
    [
        (TEXT, {**BODY, "model": "other"}, 404),
        (TEXT, {**BODY, "temperature": -1}, 422),
        (TEXT, {**BODY, "unknown_key": 1}, 422),
        (TEXT, {"model": "m"}, 422),
        (TEXT, {**BODY, "stream_options": {"include_usage": True}}, 422),
        (TEXT, [], 400),
        (CHAT, {"messages": "no"}, 422),
        ("/v1/nothing", BODY, 404),
        ("/v1/models/other", None, 405),
    ],
)
async def test_a_bad_request_is_refused_with_an_error_object(url: str, body: Any, status: int) -> None:
    server = Server()
    response = await server.post(body, url)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, status)
    assert error.keys() == {"message", "type", "param", "code"} and not server.replicas.asked


@pytest.mark.parametrize("raw", [b"{", b"\xff", b'{"prompt": NaN}', b"[" * 100_000])
async def test_a_body_that_is_no_json(raw: bytes) -> None:
    assert (await Server().client.post(TEXT, content=raw)).status_code == 400


async def test_a_body_that_is_too_large() -> None:
    assert (await Server().post({**BODY, "prompt": "x" * BODY_MAX})).status_code == 413


async def test_an_api_key_is_needed_where_there_are_some() -> None:
    server = Server(keys=read_keys("K", {"K": "alice=k"}))
    assert (await server.post()).status_code == 401
    assert (await server.client.get("/v1/models")).status_code == 401
    assert (await server.post(authorization="Bearer k")).status_code == 200
    assert (await server.client.get("/health")).status_code == 200
    assert server.counted("requests_total", endpoint=TEXT, key="alice", status="200") == 1


async def test_a_fault_of_the_request_is_its_own() -> None:
    server = Server(faults(400), A, B)
    response = await server.post()
    assert (response.status_code, len(server.replicas.asked)) == (400, 1)
    assert len(server.exchange.router.replicas) == 2


async def test_a_fault_of_the_server_counts_as_no_client_that_left() -> None:
    server = Server(lambda replica, ask: [][0])
    with pytest.raises(IndexError):
        await server.post()
    assert server.counted("requests_total", endpoint=TEXT, key="-", status="500") == 1
    assert server.counted("clients_left_total", key="-") == server.gateway.in_flight == server.exchange.in_flight == 0


async def test_without_an_engine_503_and_with_busy_ones_429() -> None:
    server = Server(says(end=False), max_in_flight=1)
    running = asyncio.ensure_future(server.post())
    await until(lambda: server.replicas.asked)
    busy = await server.post()
    server.exchange.down(A)
    gone = await running
    none = await server.post()
    assert [one.status_code for one in (busy, gone, none)] == [429, 503, 503]
    assert all(int(one.headers["retry-after"]) >= 1 for one in (busy, gone, none))
    assert (await server.client.get("/health")).status_code == 503


async def test_more_than_may_wait_are_refused_at_once() -> None:
    server = Server(says(end=False), max_in_flight=1, max_queued=1, queue_s=60)
    running = [asyncio.ensure_future(server.post()) for _ in range(2)]
    await until(lambda: server.exchange.queued)
    assert (await server.post()).status_code == 429
    server.replicas.answer = says("a")
    server.replicas.say(A, *says("a")(*server.replicas.asked[0]))
    assert [one.status_code for one in await asyncio.gather(*running)] == [200, 200]


async def test_a_server_that_ends_takes_no_requests() -> None:
    server = Server()
    server.gateway.draining = True
    response = await server.post()
    assert response.status_code == 503 and "retry-after" in response.headers


# ---- engines that are lost


async def ask_and_lose(server: Server, body: dict[str, Any], lose: Callable[[Server], None]) -> httpx2.Response:
    running = asyncio.ensure_future(server.post(body))
    await until(lambda: server.replicas.asked)
    await asyncio.sleep(0.01)
    server.replicas.answer = says("a", "b", "c")
    lose(server)
    return await running


def down(server: Server) -> None:
    server.exchange.down(server.replicas.asked[0][0])


def silent(server: Server) -> None:
    """The one that was asked: the other says something each time."""
    replica = server.replicas.asked[0][0]
    for _ in range(SILENT_BEATS + 1):
        server.exchange.beat()
        server.exchange.said(B if replica == A else A, EMPTY)
    assert server.replicas.stopped == [(replica, server.replicas.asked[0][1].id)]


def broken(server: Server) -> None:
    server.exchange.broken()
    server.exchange.up(B, "b")


@pytest.mark.parametrize("lose", [down, broken, silent])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_goes_on_elsewhere_behind_its_tokens(stream: bool, lose: Callable[[Server], None]) -> None:
    server = Server(says("a", "b", end=False), A, B, queue_s=10)
    response = await ask_and_lose(server, {**BODY, "stream": stream}, lose)
    text = text_of(response) if stream else response.json()["choices"][0]["text"]
    assert (response.status_code, text, server.replicas.asked[-1][1].so_far) == (200, "abc", ((0, 1),))
    assert server.counted("replays_total") == 1


async def test_several_choices_begin_anew_unless_the_client_has_a_part() -> None:
    body = {**BODY, "n": 2}
    server = Server(says("a", end=False), A, B)
    whole = await ask_and_lose(server, body, down)
    assert (whole.status_code, server.replicas.asked[-1][1].so_far) == (200, ())
    server = Server(says("a", end=False), A, B)
    streamed = events(await ask_and_lose(server, {**body, "stream": True}, down))
    assert (streamed[-2]["error"]["code"], streamed[-1]) == (503, "[DONE]")


async def test_without_replay_it_ends_with_an_error_in_the_stream() -> None:
    server = Server(says("a", end=False), A, B, replay=False)
    streamed = events(await ask_and_lose(server, {**BODY, "stream": True}, down))
    assert (streamed[0]["choices"][0]["text"], streamed[-2]["error"]["code"]) == ("a", 503)
    assert len(server.replicas.asked) == 1


async def test_a_request_that_is_given_back_goes_to_another_engine() -> None:
    server = Server(lambda replica, ask: (faults(503, retry=True) if replica == A else says("a"))(replica, ask), A, B)
    responses = [await server.post() for _ in range(4)]
    assert [one.status_code for one in responses] == [200] * 4


async def test_a_request_that_ends_engines_ends() -> None:
    server = Server(faults(500, retry=True))
    response = await server.post()
    assert (response.status_code, len(server.replicas.asked)) == (503, 5)


async def test_a_draining_engine_finishes_what_it_has() -> None:
    server = Server(says("a", end=False))
    running = asyncio.ensure_future(server.post())
    await until(lambda: server.replicas.asked)
    server.exchange.drain(A)
    assert (await server.post()).status_code == 503
    server.replicas.say(A, *says("b")(*server.replicas.asked[0]))
    assert (await running).json()["choices"][0]["text"] == "ab"


async def test_an_engine_that_is_silent_takes_requests_again_when_it_speaks() -> None:
    server = Server(says("a"), A)
    for _ in range(SILENT_BEATS + 1):
        server.exchange.beat()
    assert (await server.client.get("/health")).status_code == 503
    assert server.exchange.holding == 1  # a worker that comes is given another one
    server.exchange.said(A, EMPTY)
    assert (await server.post()).status_code == 200 and server.exchange.holding == 1


async def test_what_a_silent_engine_had_yet_to_say_is_no_part_of_the_next_try() -> None:
    server = Server(says("a", end=False), A, queue_s=10)
    running = asyncio.ensure_future(server.post())
    await until(lambda: server.replicas.asked)
    await asyncio.sleep(0.01)
    for _ in range(SILENT_BEATS + 1):
        server.exchange.beat()
    await until(lambda: server.exchange.queued)
    server.replicas.answer = says("a", "b", "c")
    server.replicas.say(A, Deltas(server.replicas.asked[0][1].id, (ChoiceDelta(0, (1,), "b"),)))
    response = await running
    assert (response.status_code, response.json()["choices"][0]["text"]) == (200, "abc")


async def test_a_draining_engine_that_is_silent_stays_away() -> None:
    server = Server(says("a"), A)
    server.exchange.drain(A)
    for _ in range(SILENT_BEATS + 1):
        server.exchange.beat()
    server.exchange.said(A, EMPTY)
    assert (await server.post()).status_code == 503


async def test_an_engine_that_cannot_be_reached_is_down() -> None:
    server = Server(says("a"), A)
    server.replicas.reachable = False
    running = asyncio.ensure_future(server.post())
    await until(lambda: not server.exchange.router.replicas)
    assert (await running).status_code == 503


# ---- clients that leave


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_work(stream: bool) -> None:
    server = Server(says("a", end=False))
    await server.leave({**BODY, "stream": stream})
    await until(lambda: server.replicas.stopped)
    assert server.replicas.stopped == [(A, server.replicas.asked[0][1].id)]
    assert server.counted("clients_left_total", key="-") == 1
    assert server.exchange.in_flight == server.gateway.in_flight == 0
    assert server.exchange.router.engines == {str(A): 0}


# ---- another model


async def test_waiting_requests_go_to_the_new_model_and_running_ones_end_where_they_are() -> None:
    server = Server(says("a", end=False), max_in_flight=1, queue_s=60)
    running, waiting = (asyncio.ensure_future(server.post()) for _ in range(2))
    await until(lambda: server.exchange.queued)
    newer = Replicas(says("new"))
    exchange = newer.exchange_of(server.config)
    exchange.up(B, "b")
    server.gateway.switch(Generation("two", exchange, ready=True))
    response = await waiting
    assert (response.headers["x-rollout-model"], response.json()["choices"][0]["text"]) == ("two", "new")
    server.replicas.say(A, *says("b")(*server.replicas.asked[0]))
    response = await running
    assert (response.headers["x-rollout-model"], response.json()["choices"][0]["text"]) == ("one", "ab")


async def test_a_generation_is_ready_once_it_has_generated() -> None:
    server = Server(lambda replica, ask: (faults(400) if ask.url == CHAT else says("a"))(replica, ask))
    generation = Generation("one", server.exchange)
    await generation.probe(server.config)
    assert generation.ready and [ask.url for _, ask in server.replicas.asked] == [CHAT, TEXT]

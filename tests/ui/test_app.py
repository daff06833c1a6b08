"""Who may look and give orders, and what a stream says: over a cluster that is made up."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio
from rollout.client.runs import Page as LogPage
from rollout.client.target import Target
from rollout.model.errors import AuthError, ConfigError, NotFoundError, UnavailableError
from rollout.model.item import Outcome
from rollout.security.join_client import Joined
from rollout.security.roles import Role
from rollout.ui import access as access_module
from rollout.ui.access import COOKIE, Everyone, Operators
from rollout.ui.app import application
from rollout.ui.cluster import Cluster
from rollout.ui.live import Live
from rollout.ui.page import Page, Section, linker
from rollout.ui.serving import Place
from rollout.ui.views import place_from
from rollout.wire.v1 import history_pb2
from rollout.wire.v1 import runs_pb2 as pb
from rollout.workloads.commit import CommitEntry

RUN = "01M8K5J9E1G3KXZ721JK4BJQMB"


class Client:
    """Answers as a cluster with one run."""

    def __init__(self) -> None:
        self.status = pb.RunStatus(spec=pb.RunSpec(run_id=RUN, workload="map", name="one"), state="running")
        self.asked = 0
        self.orders: list[tuple[str, str]] = []
        self.fault: Exception | None = None
        self.bytes = b""
        """Input and result of each row."""

    async def list(self, **_: Any) -> list[pb.RunStatus]:
        self.asked += 1
        if self.fault is not None:
            raise self.fault
        return [self.status]

    async def get(self, run_id: str) -> pb.RunStatus:
        if run_id != self.status.spec.run_id:
            raise NotFoundError(f"there is no run {run_id}")
        return self.status

    async def describe(self, run_id: str, *, failures: int = 10) -> pb.RunReply:
        return pb.RunReply(status=await self.get(run_id))

    async def events(self, run_id: str = "", **_: Any) -> history_pb2.EventsReply:
        return history_pb2.EventsReply()

    async def item(self, run_id: str, place: Sequence[int]) -> pb.ItemReply:
        return pb.ItemReply(item=pb.ItemStatus(state="done"), has_result=True)

    async def item_bytes(self, run_id: str, reply: pb.ItemReply) -> tuple[bytes, bytes]:
        return self.bytes, self.bytes

    async def watch(self, run_id: str, cursor: int, *, payloads: bool) -> AsyncGenerator[LogPage, None]:
        entries = [CommitEntry(0, 0, 1, Outcome.DONE, self.bytes, self.bytes, id=bytes(32))]
        yield LogPage(entries, self.status)

    async def command(self, run_id: str, verb: str, *, reason: str = "") -> pb.RunStatus:
        self.orders.append((verb, reason))
        return self.status


class MadeUp(Cluster):
    def __init__(self, client: Client) -> None:
        super().__init__(Target(["c:1"], Path(), "prod", explicit=True), lambda _: None)
        self._made_up = client

    @asynccontextmanager
    async def _reached(self) -> AsyncGenerator[tuple[Any, bool], None]:
        yield self._made_up, False


@pytest_asyncio.fixture
async def client() -> Client:
    return Client()


@pytest_asyncio.fixture
async def cluster(client: Client) -> AsyncIterator[Cluster]:
    async with MadeUp(client) as found:
        yield found


@asynccontextmanager
async def site(cluster: Cluster, access: Everyone | Operators, **options: Any) -> AsyncIterator[httpx2.AsyncClient]:
    app = application(cluster, access, **options)
    client = httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://localhost:8265")
    async with app.router.lifespan_context(app), client:
        yield client


async def test_loopback_answers_to_its_own_name_only(cluster: Cluster) -> None:
    async with site(cluster, Everyone()) as page:
        assert (await page.get("/")).status_code == 200
        for host in ("127.0.0.1:8265", "[::1]:8265", "localhost"):
            assert (await page.get("/", headers={"host": host})).status_code == 200
        for host in ("evil.example", "localhost.evil.example:8265", ""):
            assert (await page.get("/", headers={"host": host})).status_code == 421


async def test_an_order_is_asked_for_and_then_given_once(cluster: Cluster, client: Client) -> None:
    async with site(cluster, Everyone()) as page:
        question = await page.get(f"/runs/{RUN}/order/kill")
        token = re.search(r'name="token" value="([^"]+)"', question.text)
        assert token is not None and "0 attempts" in question.text and client.orders == []
        stranger = await page.post(f"/runs/{RUN}/order/kill", data={"reason": "x"})
        assert stranger.status_code == 403 and client.orders == []
        assert (await page.post(f"/runs/{RUN}/order/kill", data={"token": "\xe9"})).status_code == 403
        given = await page.post(f"/runs/{RUN}/order/kill", data={"token": token[1], "reason": "too slow"})
        assert (given.status_code, given.headers["location"]) == (303, f"/runs/{RUN}")
        assert client.orders == [("kill", "too slow")]


async def test_what_is_not_there_is_said(cluster: Cluster) -> None:
    async with site(cluster, Everyone()) as page:
        for path in (
            "/nothing",
            "/runs/nothing/output",
            f"/runs/{RUN}/items/x",
            f"/runs/{RUN}/order/explode",
            f"/runs/{RUN}/items/{'9' * 5_000}",
            "/stream?page=//[",
            f"/runs/{RUN}%3F",
        ):
            answer = await page.get(path)
            assert answer.status_code == 404 and "default-src 'none'" in answer.headers["content-security-policy"]


WORKLOADS = ("map", "infer", "train", "job", "experiment", "test", "serve", "nobody-has-it")
CONFIGS = (b"", b"{}", b'{"model": 1, "backend": [], "job": 3, "executors": 7, "experiment": 0, "carried": 1}',
           b'{"a": "\\ud800"}', b'{"a":' + b"[" * 900 + b"]" * 900 + b"}")  # fmt: skip
RESULTS = (b"", b"[]", b"null", b"\xff", b'"\\ud800"', b"[" * 200_000, b'{"step": "x", "metrics": 3, "cases": [1]}',
           b"[" * 900 + b"]" * 900)  # fmt: skip


@pytest.mark.parametrize("workload", WORKLOADS)
async def test_a_run_of_another_version_is_shown(cluster: Cluster, client: Client, workload: str) -> None:
    async with site(cluster, Everyone()) as page:
        for number, (config, client.bytes) in enumerate(zip(itertools.cycle(CONFIGS), RESULTS, strict=False)):
            run_id = f"{RUN[:-2]}{number:02}"
            spec = pb.RunSpec(run_id=run_id, workload=workload, config=config, name="\x1b[1m<b>")
            client.status = pb.RunStatus(spec=spec, state="completed", cursor=1, done=1, ended_ms=1)
            for path in ("", "/items/1", "/order/kill"):
                for _ in range(2):
                    answer = await page.get(f"/runs/{run_id}{path}")
                    assert answer.status_code == 200, (config[:80], client.bytes[:80], path)
                    assert "\x1b" not in answer.text and "<b>" not in answer.text


async def test_others_log_in_with_an_operators_token(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    used: list[tuple[str, str]] = []

    async def join(address: str, token: str, tls_dir: Path, host_name: str) -> Joined:
        if token in [one for one, _ in used]:
            raise AuthError("the token was used before")
        used.append((token, host_name))
        return Joined("prod", Role.WORKER if token == "worker's" else Role.OPERATOR, "h", (), tls_dir)

    monkeypatch.setattr(access_module, "join", join)
    monkeypatch.setattr(access_module, "check_role", lambda token, role: None)  # pyright: ignore
    access = Operators("c:2", Target(["c:1"], Path(), "prod", explicit=True))
    async with site(cluster, access, base="/rollout") as page:
        for path in ("/", "/stream?page=/", f"/runs/{RUN}/order/kill"):
            sent = await page.get(path)
            assert (sent.status_code, sent.headers["location"]) == (303, "/rollout/login")
        assert (await page.post(f"/runs/{RUN}/order/kill", data={"token": "x"})).status_code == 303
        entered = await page.post("/login", data={"name": "Ada", "token": "secret"})
        assert entered.status_code == 303 and used == [("secret", "Ada")]
        cookie = entered.headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=strict" in cookie and "Path=/rollout" in cookie
        given = {"cookie": f"{COOKIE}={re.search(f'{COOKIE}=([^;]+)', cookie)[1]}"}  # pyright: ignore
        home = await page.get("/", headers=given)
        assert home.status_code == 200 and "Log out Ada" in home.text and 'href="/rollout/workers"' in home.text
        assert (await page.post("/login", data={"name": "Eve", "token": "secret"})).status_code == 403
        assert (await page.post("/login", data={"name": "Eve", "token": "worker's"})).status_code == 403
        assert (await page.post("/login", data={"name": " ", "token": "second"})).status_code == 403
        assert len(list(tmp_path.glob("*/*"))) == 1
        form = re.search(r'name="token" value="([^"]+)"', home.text)
        assert form is not None
        await page.post("/logout", data={"token": form[1]}, headers=given)
        assert (await page.get("/", headers=given)).status_code == 303
        assert not list(tmp_path.glob("*/*"))
    access.close()


@pytest.mark.parametrize(
    ("place", "private"),
    [
        (Place("0.0.0.0:8265"), False),
        (Place("127.0.0.1:8265", prefix="/rollout"), False),
        (Place("127.0.0.1:8265", prefix="rollout", join_address="c:2"), False),
        (Place("127.0.0.1:8265", prefix="//evil.example", join_address="c:2"), False),
        (Place("127.0.0.1:8265", prefix="/a;b", join_address="c:2"), False),
        (Place("127.0.0.1:8265", certificate=Path("c.pem")), False),
        (Place("nonsense"), False),
        (Place("0.0.0.0:8265", join_address="c:2"), True),
    ],
)
def test_a_place_that_is_not_safe_is_refused(place: Place, private: bool) -> None:
    target = Target([], Path(), "prod", False, private=Path("out/.rollout") if private else None)
    with pytest.raises(ConfigError):
        place.check(target)


@pytest.mark.parametrize(
    ("place", "warned"),
    [
        (Place("0.0.0.0:8265"), True),
        (Place("0.0.0.0:8265", certificate=Path("c.pem"), key=Path("k.pem")), False),
        (Place("127.0.0.1:8265", prefix="/rollout"), False),
    ],
)
def test_a_login_over_plain_http_is_warned_of(place: Place, warned: bool) -> None:
    assert bool(place.warning) is warned


async def test_those_who_look_at_the_same_share_one_question(cluster: Cluster, client: Client) -> None:
    async with site(cluster, Everyone()) as page:
        await asyncio.gather(*(page.get("/") for _ in range(50)))
    assert client.asked == 1


async def test_while_nobody_answers_the_last_answer_stands(cluster: Cluster, client: Client) -> None:
    async def ask(found: Any) -> int:
        return len(await found.list())

    assert await cluster.shared(("x",), ask, 0.0) == 1 and cluster.trouble == ""
    client.fault = UnavailableError("nobody leads")
    assert await cluster.shared(("x",), ask, 0.0) == 1 and cluster.trouble == "nobody leads"
    with pytest.raises(UnavailableError):
        await cluster.shared(("y",), ask, 0.0)
    client.fault = None
    assert await cluster.shared(("x",), ask, 0.0) == 1 and cluster.trouble == ""


async def test_a_stream_says_what_changed_and_ends(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.ui.live.EVERY_S", 0.01)
    texts = {"a": "one", "b": "same"}
    live = True

    async def view() -> Page:
        sections = [Section("fault", {"message": text}, key) for key, text in texts.items()]
        return Page("x", sections, live=live)

    streams = Live(cluster, linker(""))
    told: list[dict[str, Any]] = []
    last = ""
    async with aclosing(streams.stream("/x", view)) as events:
        async for event in events:
            if event.startswith("event: change"):
                told.append(json.loads(event.partition("data: ")[2]))
            if len(told) == 1:
                texts["a"] = "two"
            elif len(told) == 2 and live:
                live = False
            last = event
    assert [set(one["sections"]) for one in told] == [{"fault-a", "fault-b"}, {"fault-a"}, set()]
    assert last.startswith("event: end")
    await streams.close()


async def test_a_stream_that_waits_ends_with_the_server(cluster: Cluster) -> None:
    async def view() -> Page:
        return Page("x", [Section("fault", {"message": "the same"})])

    streams = Live(cluster, linker(""))
    async with aclosing(streams.stream("/x", view)) as events:
        await anext(events)
        waiting = asyncio.ensure_future(anext(events, None))
        await asyncio.sleep(0)
        await streams.end()
        assert await waiting is None
    await streams.close()


async def test_a_reader_that_is_slow_gets_the_newest_only(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.ui.live.EVERY_S", 0.001)
    made = 0

    async def view() -> Page:
        nonlocal made
        made += 1
        return Page("x", [Section("fault", {"message": str(made)})])

    streams = Live(cluster, linker(""))
    async with aclosing(streams.stream("/x", view)) as events:
        await anext(events)
        while made < 100:  # noqa: ASYNC110 - the view counts, and tells nobody
            await asyncio.sleep(0.01)
        second = json.loads((await anext(events)).partition("data: ")[2])
    shown = int(re.search(r">(\d+)<", second["sections"]["fault"])[1])  # pyright: ignore
    assert shown >= 100
    await streams.close()


@pytest.mark.parametrize("text", ["", "0", "x", "1.", "-1", "1.0"])
def test_what_is_no_row_is_refused(text: str) -> None:
    with pytest.raises(NotFoundError):
        place_from(text)


def test_rows_count_from_one() -> None:
    assert place_from("43.2") == (42, 1)

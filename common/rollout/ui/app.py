"""The live page as an ASGI application."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout.client import Runs
from rollout.model.errors import InputError, NotFoundError, ProtocolError, RolloutError
from rollout.ui import objects, views
from rollout.ui.access import COOKIE, SESSION_S, Everyone, Operators, Session
from rollout.ui.cluster import Cluster
from rollout.ui.digests import Digests
from rollout.ui.live import Live
from rollout.ui.orders import ORDERS, drain_text
from rollout.ui.page import Page, Section, asset, environment, linker, render
from rollout.wire.v1 import runs_pb2 as pb

_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_ASSETS = ("page.css", "page.js", "language.js", "uplot.css", "uplot.js", "idiomorph.js", "icon.svg")
_FORM_MAX = 16 << 10
_FORM_S = 30.0
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cache-control": "no-store",
}


@dataclass(frozen=True, slots=True)
class Site:
    """What every request needs. `base` is the prefix that a proxy adds, without a slash at its end."""

    cluster: Cluster
    reading: views.Reading
    live: Live
    access: Everyone | Operators
    base: str
    link: Callable[..., str]
    secure: bool


def application(cluster: Cluster, access: Everyone | Operators, *, base: str = "", secure: bool = False) -> Starlette:
    """Make the application. `cluster` is already entered. `secure` means that the page is served over https."""
    site: Site | None = None

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None, None]:
        nonlocal site
        link, digests = linker(base), Digests(cluster)
        live = Live(cluster, link)
        site = Site(cluster, views.Reading(cluster, digests), live, access, base, link, secure)
        app.state.site = site
        try:
            yield
        finally:
            await live.close()
            await digests.close()

    routes = [
        Route("/health", _health),
        Route("/static/{name}", _static),
        Route("/login", _login, methods=["GET", "POST"]),
        Route("/logout", _logout, methods=["POST"]),
        Route("/stream", _stream),
        Route("/runs/{run_id}/order/{verb}", _order_run, methods=["GET", "POST"]),
        Route("/workers/{worker}/order/drain", _order_worker, methods=["GET", "POST"]),
        Route("/{path:path}", _view),
    ]
    return Starlette(routes=routes, lifespan=lifespan, middleware=[Middleware(_Guard)])


async def end_streams(app: Starlette) -> None:
    """End the streams of a running application."""
    site: Site = app.state.site
    await site.live.end()


class _Guard:
    """Adds headers to every answer, and redirects users without a session to the login."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        site: Site = scope["app"].state.site
        if site.base and f"{scope['path']}/".startswith(f"{site.base}/"):  # a proxy may leave it there or not
            scope = {**scope, "path": scope["path"].removeprefix(site.base) or "/"}
        request = Request(scope)
        session = site.access.session_of(request.cookies.get(COOKIE, ""))
        path = scope["path"]

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message["headers"]}
                message["headers"] += [
                    (name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in given
                ]
            await send(message)

        if not site.access.allows(request.headers.get("host", "")):
            refused: ASGIApp = PlainTextResponse("This page answers to the name localhost only.", 421)
            await refused(scope, receive, guarded)
        elif session is None and path not in ("/login", "/health") and not path.startswith("/static/"):
            await RedirectResponse(site.link("/login"), 303)(scope, receive, guarded)
        else:
            scope.setdefault("state", {})["session"] = session
            await self._app(scope, receive, guarded)


def _site(request: Request) -> Site:
    return request.app.state.site


async def _form(request: Request) -> dict[str, str]:
    """Return the fields of a form; empty if it is too long or too slow."""
    body = bytearray()
    try:
        async with asyncio.timeout(_FORM_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > _FORM_MAX:
                    return {}
    except TimeoutError:
        return {}
    return dict(parse_qsl(body.decode("utf-8", "replace")))


def _is_of(form: Mapping[str, str], session: Session) -> bool:
    return secrets.compare_digest(form.get("token", "").encode(), session.form.encode())


def _session(request: Request) -> Session:
    return request.state.session


async def _health(request: Request) -> Response:
    return PlainTextResponse("ok\n")


async def _static(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in _ASSETS:
        return PlainTextResponse("not found", 404)
    return Response(asset(name), media_type=_TYPES[name[name.rindex(".") :]], headers={"cache-control": "max-age=3600"})


# ---- views


def _find(site: Site, path: str, query: Mapping[str, str]) -> Callable[[], Awaitable[Page]] | None:
    """Return the view at a path, or None if there is none. Raises NotFoundError if a part of the path names nothing."""
    reading = site.reading
    match path.strip("/").split("/"):
        case [""]:
            return partial(
                views.runs_view,
                reading,
                text=query.get("text", ""),
                state=query.get("state", ""),
                workload=query.get("workload", ""),
                page=_number(query, "page", 1),
            )
        case ["events"]:
            return partial(views.events_view, reading)
        case ["workers"]:
            return partial(views.workers_view, reading, everyone="everyone" in query, page=_number(query, "page", 1))
        case ["workers", worker]:
            return partial(views.worker_view, reading, worker)
        case ["runs", run_id]:
            return partial(views.run_view, reading, run_id)
        case ["runs", run_id, "events"]:
            return partial(views.events_view, reading, run_id)
        case ["runs", run_id, "output"]:
            return partial(views.output_view, reading, run_id)
        case ["runs", run_id, "items"]:
            parent = views.place_from(query["parent"]) if query.get("parent") else ()
            which = query.get("which", "all")
            which = which if which in views.WHICH else "all"
            return partial(
                views.items_view, reading, run_id, which=which, start=_number(query, "row", 1) - 1, parent=parent
            )
        case ["runs", run_id, "items", place]:
            return partial(views.item_view, reading, run_id, views.place_from(place))
        case ["runs", run_id, "samples", object_id]:
            return partial(objects.samples_view, reading, run_id, object_id, start=_number(query, "start", 0))
        case ["runs", run_id, "files", object_id]:
            return partial(objects.files_view, reading, run_id, object_id, query.get("name", ""))
        case _:
            return None


def _number(query: Mapping[str, str], name: str, least: int) -> int:
    text = query.get(name, "")
    return max(least, int(text)) if text.isascii() and text.isdecimal() and len(text) < 16 else least


async def _view(request: Request) -> Response:
    site, path = _site(request), _path(request)
    try:
        view = _find(site, path, request.query_params)
        if view is None:
            return _fault(request, "There is no such page.", 404)
        page = await view()
    except NotFoundError as error:
        return _fault(request, error.message, 404)
    except RolloutError as error:
        return _fault(request, error.message, 400 if isinstance(error, InputError | ProtocolError) else 503)
    query = urlencode(request.query_params.multi_items())
    address = quote(path) + (f"?{query}" if query else "")
    return _html(request, page, stream=site.link("/stream", page=address) if page.live else "")


def _path(request: Request) -> str:
    """Return the path as sent; `request.url` would include the Host header."""
    return request.scope["path"]


def _fault(request: Request, message: str, status: int) -> Response:
    title = {404: "Not found", 503: "The cluster does not answer", 400: "Not understood", 403: "Refused"}[status]
    return _html(request, Page(title, [Section("fault", {"message": message})], live=False), status=status)


def _html(request: Request, page: Page, *, stream: str = "", status: int = 200) -> Response:
    site, session = _site(request), getattr(request.state, "session", None)
    sections = [(section.id, render(section, site.link)) for section in page.sections]
    text = (
        environment()
        .get_template("base.html.j2")
        .render(
            page=page,
            sections=sections,
            link=site.link,
            here=_path(request),
            stream=stream,
            cluster=site.cluster.name,
            trouble=site.cluster.trouble,
            user=session.name if session is not None else "",
            token=session.form if session is not None else "",
        )
    )
    return HTMLResponse(text.encode("utf-8", "backslashreplace"), status)  # JSON may have half of a surrogate pair


async def _stream(request: Request) -> Response:
    site = _site(request)
    address = request.query_params.get("page", "/")
    path, _, query = address.partition("?")
    try:
        view = _find(site, unquote(path), dict(parse_qsl(query, keep_blank_values=True)))
    except NotFoundError:
        view = None
    if view is None:
        return PlainTextResponse("there is no such page", 404)
    if site.live.full:
        return PlainTextResponse("too many pages are open", 503, headers={"retry-after": "30"})
    return StreamingResponse(
        site.live.stream(address, view), media_type="text/event-stream", headers={"x-accel-buffering": "no"}
    )


# ---- orders


async def _order_run(request: Request) -> Response:
    site, run_id, order = _site(request), request.path_params["run_id"], ORDERS.get(request.path_params["verb"])
    if order is None:
        return _fault(request, "There is no such order.", 404)

    async def what(client: Runs) -> str:
        status: pb.RunStatus = await client.get(run_id)
        return order.what(status)

    async def give(client: Runs, reason: str) -> None:
        await order.give(client, run_id, reason)

    return await _ordered(request, site, what, give, verb=order.verb, back=f"/runs/{run_id}", reasoned=True)


async def _order_worker(request: Request) -> Response:
    worker = request.path_params["worker"]

    async def what(client: Runs) -> str:
        return drain_text(await client.worker(worker))

    async def give(client: Runs, reason: str) -> None:
        await client.worker_command(worker, "drain")

    return await _ordered(request, _site(request), what, give, verb="drain", back=f"/workers/{worker}", reasoned=False)


async def _ordered(
    request: Request,
    site: Site,
    what: Callable[[Runs], Awaitable[str]],
    give: Callable[[Runs, str], Awaitable[None]],
    *,
    verb: str,
    back: str,
    reasoned: bool,
) -> Response:
    """Ask for confirmation first, then carry out the action."""
    session = _session(request)
    try:
        if request.method == "POST":
            form = await _form(request)
            if not _is_of(form, session):
                return _fault(request, "This form is of another session. Go back and try again.", 403)
            reason = form.get("reason", "")[:200]
            if isinstance(site.access, Operators):
                async with site.access.client(session) as client:
                    await give(client, reason)
            else:
                await site.cluster.ask(lambda client: give(client, reason))
            return RedirectResponse(site.link(back), 303)
        text = await site.cluster.ask(what)
    except NotFoundError as error:
        return _fault(request, error.message, 404)
    except RolloutError as error:
        return _fault(request, error.message, 503 if error.retryable else 400)
    data: dict[str, Any] = {
        "what": text, "verb": verb.capitalize(), "token": session.form, "back": back, "reasoned": reasoned,
    }  # fmt: skip
    return _html(request, Page(f"{verb.capitalize()}?", [Section("order", data)], live=False))


async def _login(request: Request) -> Response:
    site, fault = _site(request), ""
    if not isinstance(site.access, Operators):
        return RedirectResponse(site.link("/"), 303)
    if request.method == "POST":
        form = await _form(request)
        try:
            cookie = await site.access.begin(form.get("name", "").strip()[:80], form.get("token", "").strip())
        except RolloutError as error:
            fault = error.message
        else:
            answer = RedirectResponse(site.link("/"), 303)
            answer.set_cookie(
                COOKIE, cookie, max_age=SESSION_S, path=site.base or "/", secure=site.secure, httponly=True,
                samesite="strict",
            )  # fmt: skip
            return answer
    page = Page("Log in", [Section("login", {"fault": fault})], live=False)
    return _html(request, page, status=403 if fault else 200)


async def _logout(request: Request) -> Response:
    site, session = _site(request), _session(request)
    form = await _form(request)
    if isinstance(site.access, Operators) and _is_of(form, session):
        site.access.end(request.cookies.get(COOKIE, ""))
    return RedirectResponse(site.link("/login"), 303)

"""Access control: on loopback every user of this machine may read and act, elsewhere those who logged in with an
operator's token."""

from __future__ import annotations

import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rollout.client import Runs
from rollout.client.target import Target, connected
from rollout.config.scratch import Scratch
from rollout.model.address import is_loopback
from rollout.model.errors import AuthError, RolloutError
from rollout.security.join_client import join
from rollout.security.roles import Role
from rollout.security.tokens import check_role

COOKIE = "rollout-session"
SESSION_S = 12 * 3600
_SESSIONS = 1_000
_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class Session:
    """A session. `name` is the user's in events, empty without a login. `form` is a value in every form that changes
    something, unknown to other sites. `identity` is the directory of the user's certificate."""

    name: str
    form: str = field(default_factory=secrets.token_urlsafe)
    identity: Path | None = None
    ends: float = float("inf")


class Everyone:
    """Admits every user of this machine, for a page on loopback. The Host header must be a loopback name, because
    another site's page could reach it under a name of its own that resolves to loopback."""

    def __init__(self) -> None:
        self._session = Session("")

    def session_of(self, cookie: str) -> Session:
        return self._session

    def allows(self, host: str) -> bool:
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        return name == "localhost" or is_loopback(name.strip("[]"))


class Operators:
    """Admits users with a token of the role operator. The token is used up, and buys the certificate with which they
    act."""

    def __init__(self, join_address: str, target: Target) -> None:
        self._address = join_address
        self._target = target
        self._sessions: dict[str, Session] = {}
        self._scratch = Scratch("rollout-ui-sessions-")

    def close(self) -> None:
        self._scratch.cleanup()

    def session_of(self, cookie: str) -> Session | None:
        session = self._sessions.get(cookie)
        if session is not None and session.ends < time.monotonic():
            self.end(cookie)
            return None
        return session

    def allows(self, host: str) -> bool:
        return True

    async def begin(self, name: str, token: str) -> str:
        """Start a session and return its cookie. Raises RolloutError."""
        if len(self._sessions) >= _SESSIONS:
            for key in [key for key, one in self._sessions.items() if one.ends < time.monotonic()]:
                self.end(key)
        if len(self._sessions) >= _SESSIONS:
            raise AuthError("too many sessions: log out elsewhere, or start `rollout ui` anew")
        if not name:
            raise AuthError("enter your name: events say who gave an order")
        check_role(token, Role.OPERATOR)
        identity = Path(tempfile.mkdtemp(dir=self._scratch.name))
        try:
            joined = await join(self._address, token, identity, name)
            if joined.role is not Role.OPERATOR:  # only the cluster knows: a token's own word for it can be changed
                raise AuthError(f"this token is of the role {joined.role}: it gives no order, and shows nothing")
        except RolloutError:
            shutil.rmtree(identity)
            raise
        cookie = secrets.token_urlsafe(32)
        self._sessions[cookie] = Session(name, identity=identity, ends=time.monotonic() + SESSION_S)
        return cookie

    def end(self, cookie: str) -> None:
        session = self._sessions.pop(cookie, None)
        if session is not None and session.identity is not None:
            shutil.rmtree(session.identity)

    @asynccontextmanager
    async def client(self, session: Session) -> AsyncGenerator[Runs, None]:
        assert session.identity is not None
        target = Target(self._target.addresses, session.identity, self._target.cluster, explicit=True)
        async with connected(target, patience_s=_PATIENCE_S) as client:
            yield client

"""Last answers of a cluster's coordinators, as one cause: which refuses, which stands by, which leads."""

from __future__ import annotations

from rollout.model.errors import NotLeaderError, RolloutError, UnavailableError

REFUSED_S = 5.0
"""Seconds after which a call gives up if every coordinator refused connections from the start: nothing runs there."""
WRONG_PEER_S = 3.0
"""Seconds for which a failed handshake may be due to a renewal; after that the certificates are another cluster's."""
_REFUSED = "connection refused"
_SILENT = "endpoint closing"  # ours, which we closed when the TLS handshake took too long
_WRONG_PEER = ("CERTIFICATE_VERIFY_FAILED", "TLSV1_ALERT", "SSLV3_ALERT", "CERTIFICATE_UNKNOWN", "BAD_CERTIFICATE")


def is_wrong_peer(details: str) -> bool:
    """Return whether a handshake failed because of the certificates."""
    return any(word in details.upper() for word in _WRONG_PEER)


class Answers:
    """Last failure of each address since one of them answered properly."""

    def __init__(self) -> None:
        self._last: dict[str, RolloutError] = {}

    def note(self, address: str, error: RolloutError) -> None:
        self._last[address] = error

    def clear(self) -> None:
        self._last.clear()

    def refused(self, addresses: list[str]) -> bool:
        """Return whether nothing listens at any of these."""
        return all(address in self._last and _refuses(self._last[address]) for address in addresses)

    def wrong_peer(self, addresses: list[str]) -> bool:
        """Return whether another cluster answers at each of these."""
        return all(address in self._last and is_wrong_peer(self._last[address].message) for address in addresses)

    def text(self) -> str:
        """Return a sentence without its period, empty if nobody has answered."""
        if not self._last:
            return ""
        if any(isinstance(error, NotLeaderError) for error in self._last.values()):
            what = "nobody leads at present"
        else:
            what = "no coordinator answers" if len(self._last) > 1 else ""
        told = "; ".join(_said(address, error) for address, error in self._last.items())
        if len(self._last) == 1 and self.refused(list(self._last)):
            return f"{told}: no coordinator listens there (yet), or the address is wrong"
        return f"{what}: {told}" if what else told


def no_answer(answers: Answers, addresses: list[str], last: RolloutError, waited_s: float) -> UnavailableError:
    """Return the error of a call that was tried for `waited_s` seconds."""
    said = answers.text() or last.message
    if answers.refused(addresses):
        what_to_do = "start the coordinator, or correct the address"
    else:
        what_to_do = "`rollout doctor` looks at each of them"
    return UnavailableError(f"{said}. Tried for {waited_s:.0f} s; {what_to_do}")


def _refuses(error: RolloutError) -> bool:
    return _REFUSED in error.message.lower()


def _said(address: str, error: RolloutError) -> str:
    if _refuses(error):
        return f"{address} refuses connections"
    if _SILENT in error.message.lower():
        return f"{address} takes connections but says nothing, so what runs there hangs, or is no coordinator"
    if isinstance(error, NotLeaderError):
        leader = str(error.context.get("leader") or "")
        return f"{address} is a standby" + (f" and takes {leader} for the leader" if leader else "")
    said = error.message.splitlines()[0].rstrip(".")[:300] if error.message else error.code
    return said if address in said else f"{address}: {said}"

"""GCS in this process: gcp-storage-emulator, with what it leaves out and our code relies on.

Of its own: `ifGenerationMatch` and `generation`, pages of lists, 416, errors with a message, and resumable sessions as
https://cloud.google.com/storage/docs/performing-resumable-uploads says (multiples of 256 KiB, offsets, the answer after
the end, cancellation).
"""

from __future__ import annotations

import io
import itertools
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import ThreadingHTTPServer
from typing import Any, cast
from urllib.parse import parse_qs, unquote, urlsplit

from gcp_storage_emulator import server as emulator
from gcp_storage_emulator.exceptions import Conflict
from gcp_storage_emulator.handlers import buckets, objects
from gcp_storage_emulator.storage import Storage
from rollout.config.cloud import GCS_CHUNK_UNIT, CloudSection

PAGE = 1000
UPLOAD = "/upload/storage/v1/b/"
OBJECTS = "/storage/v1/b/"
BUCKET_GONE = "The specified bucket does not exist."


@dataclass
class Session:
    bucket: str
    key: str
    meta: dict[str, Any]
    condition: str | None
    chunks: list[bytes] = field(default_factory=list[bytes])
    finished: dict[str, Any] | None = None

    @property
    def held(self) -> int:
        return sum(map(len, self.chunks))


class _Memory(Storage):
    def __init__(self) -> None:
        super().__init__(use_memory_fs=True)

    def _write_config_to_file(self) -> None:
        """Nothing: it would write all it has at each change."""


class Answered(Exception):
    def __init__(self, status: int, body: Any = None, headers: dict[str, str] | None = None) -> None:
        super().__init__(status)
        self.status, self.headers = status, headers or {}
        self.body = b"" if body is None else json.dumps(body).encode()


def failure(status: int, message: str, reason: str = "") -> dict[str, Any]:
    return {"error": {"code": status, "message": message, "errors": [{"message": message, "reason": reason}]}}


@dataclass
class Gcs:
    """`calls`: what was asked for, as "GET /storage/v1/b/...". `refuse`: what the next requests that a function of the
    method and the path says yes to are answered with. `lose`: requests that are done, but not answered: the connection
    ends. `cut`: bytes of the next answers with an object's body. `steps`: calls that a copy takes."""

    endpoint: str
    storage: Any
    bucket: str = ""
    calls: list[str] = field(default_factory=list[str])
    sessions: dict[str, Session] = field(default_factory=dict[str, Session])
    refuse: list[tuple[Callable[[str, str], bool], Answered]] = field(
        default_factory=list[tuple[Callable[[str, str], bool], Answered]]
    )
    steps: int = 1
    lose: list[Callable[[str, str], bool]] = field(default_factory=list[Callable[[str, str], bool]])
    cut: list[int] = field(default_factory=list[int])
    _names: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    lock: threading.RLock = field(default_factory=threading.RLock)

    def cloud(self, endpoint: str = "", **gcs: Any) -> CloudSection:
        section = {"bucket": self.bucket, "endpoint_url": endpoint or self.endpoint, **gcs}
        return CloudSection.model_validate({"provider": "gcp", "project": "test-project", "gcs": section})

    def make_bucket(self, name: str) -> None:
        made: Any = buckets.create_bucket(name, self.storage)
        made["softDeletePolicy"] = {"retentionDurationSeconds": "0"}

    def renew(self) -> None:
        """Another, empty bucket; what was kept for other tests is dropped."""
        with self.lock:
            self.storage.wipe()
            self.calls.clear()
            self.sessions.clear()
            self.refuse.clear()
            self.lose.clear()
            self.cut.clear()
            self.steps = 1
            self.bucket = f"bucket-{next(self._names)}"
            self.make_bucket(self.bucket)

    def names(self, bucket: str = "") -> list[str]:
        return sorted(self.storage.objects.get(bucket or self.bucket, {}))

    def content(self, key: str) -> bytes:
        return self.storage.get_file(self.bucket, key)

    def put(self, key: str, content: bytes) -> None:
        """As another client would."""
        private = cast(Any, objects)
        kind = "application/octet-stream"
        made = private._make_object_resource(self.endpoint, self.bucket, key, kind, str(len(content)))
        self.storage.create_file(self.bucket, key, content, private._checksums(content, made))

    def unfinished(self) -> list[str]:
        return [session.key for session in self.sessions.values() if session.finished is None]


def _multipart(content_type: str, body: bytes) -> tuple[dict[str, Any], bytes]:
    """Metadata and content: https://www.rfc-editor.org/rfc/rfc2387."""
    boundary = b"--" + content_type.partition("boundary=")[2].strip("\"'").encode()
    _, meta, rest = body.split(boundary, 2)
    content = rest[: rest.rindex(b"\r\n" + boundary)]
    return json.loads(meta.partition(b"\r\n\r\n")[2]), content.partition(b"\r\n\r\n")[2]


class _Handler(emulator.RequestHandler):
    protocol_version = "HTTP/1.1"
    _ids = itertools.count(1)

    def __init__(self, gcs: Gcs, *args: Any) -> None:
        self.gcs = gcs
        self.extra: dict[str, str] = {}
        super().__init__(gcs.storage, *args)

    def handle(self) -> None:
        # Clients that go away in the middle are what some tests are about.
        try:
            super().handle()
        except OSError:
            self.close_connection = True

    def end_headers(self) -> None:
        for name, value in self.extra.items():
            self.send_header(name, value)
        self.extra = {}
        super().end_headers()

    def do_GET(self) -> None:
        self._do("GET")

    def do_POST(self) -> None:
        self._do("POST")

    def do_PUT(self) -> None:
        self._do("PUT")

    def do_DELETE(self) -> None:
        self._do("DELETE")

    def do_PATCH(self) -> None:
        self._do("PATCH")

    def _do(self, method: str) -> None:
        body = cast(Any, emulator)._read_raw_data(self) or b""
        if len(body) < int(self.headers.get("Content-Length", 0)):
            self._cut(body)
            return
        del self.headers["Transfer-Encoding"]
        del self.headers["Content-Length"]
        self.headers["Content-Length"] = str(len(body))
        (rfile, self.rfile), (wfile, self.wfile) = (self.rfile, io.BytesIO(body)), (self.wfile, io.BytesIO())
        try:
            with self.gcs.lock:
                self._checked(method, body)
                emulator.Router(self).handle(method)
        except Answered as e:
            self.send_response(e.status)
            for name, value in e.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(e.body)))
            self.end_headers()
            self.wfile.write(e.body)
        finally:
            answer, self.rfile, self.wfile = self.wfile.getbuffer(), rfile, wfile
        for lost in self.gcs.lose:
            if lost(method, self.path):
                self.gcs.lose.remove(lost)
                self.close_connection = True
                return
        if self.gcs.cut and "alt=media" in self.path:
            self.close_connection = True
            answer = answer[: self.gcs.cut.pop(0)]
        self.wfile.write(answer)

    def _cut(self, body: bytes) -> None:
        """Of a chunk that does not arrive whole GCS keeps what is a multiple of 256 KiB."""
        self.close_connection = True
        query = parse_qs(urlsplit(self.path).query)
        session = self.gcs.sessions.get(query.get("upload_id", [""])[0])
        begin = self.headers.get("Content-Range", "").removeprefix("bytes ").split("-")[0]
        with self.gcs.lock:
            if session is not None and begin == str(session.held):
                session.chunks.append(body[: len(body) // GCS_CHUNK_UNIT * GCS_CHUNK_UNIT])

    def _checked(self, method: str, body: bytes) -> None:
        """What the emulator leaves out; what is left to it returns."""
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        self.gcs.calls.append(f"{method} {url.path}")
        for refusal in self.gcs.refuse:
            if refusal[0](method, self.path):
                self.gcs.refuse.remove(refusal)
                raise refusal[1]
        upload = url.path.startswith(UPLOAD)
        if not upload and not url.path.startswith(OBJECTS):
            return
        bucket, _, rest = url.path.removeprefix(UPLOAD if upload else OBJECTS).partition("/")
        if bucket not in self.storage.buckets:
            raise Answered(404, failure(404, BUCKET_GONE, "notFound"))
        if upload:
            self._upload(method, bucket, query, body)
        elif rest == "o" and method == "GET":
            raise Answered(200, self._list(bucket, query))
        elif rest.startswith("o/"):
            self._object(method, bucket, rest.removeprefix("o/"), query)

    def _generation(self, bucket: str, key: str) -> str:
        """ "0": there is no such object, as in a condition."""
        found = self.storage.objects.get(bucket, {}).get(key)
        return str(found["generation"]) if found else "0"

    def _held_to(self, condition: str | None, bucket: str, key: str) -> None:
        if condition is not None and condition != self._generation(bucket, key):
            message = "At least one of the pre-conditions you specified did not hold."
            raise Answered(412, failure(412, message, "conditionNotMet"))

    def _object(self, method: str, bucket: str, rest: str, query: dict[str, str]) -> None:
        key, _, target = rest.partition("/rewriteTo/b/")
        key, condition = unquote(key), query.get("ifGenerationMatch")
        if target:
            if self._generation(bucket, key) != query.get("sourceGeneration", self._generation(bucket, key)):
                raise Answered(404, failure(404, f"No such object: {bucket}/{key}", "notFound"))
            other, _, name = target.partition("/o/")
            self._held_to(condition, other, unquote(name))
            step = int(query.get("rewriteToken", "0")) + 1
            if step < self.gcs.steps:
                raise Answered(200, {"done": False, "rewriteToken": str(step)})
            return
        generation = self._generation(bucket, key)
        if generation == "0" or query.get("generation", generation) != generation:
            raise Answered(404, failure(404, f"No such object: {bucket}/{key}", "notFound"))
        self._held_to(condition, bucket, key)
        if query.get("alt") == "media":
            size = len(self.storage.get_file(bucket, key))
            begin = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0]
            if "Range" in self.headers and int(begin) >= size:
                raise Answered(416, headers={"Content-Range": f"bytes */{size}"})
            self.extra = {"X-Goog-Generation": generation}

    def _list(self, bucket: str, query: dict[str, str]) -> dict[str, Any]:
        items, prefixes = self.storage.get_file_list(bucket, query.get("prefix"), query.get("delimiter"))
        after = query.get("pageToken", "")
        least = query.get("startOffset", "")
        found = {item["name"]: item for item in items if item["name"] >= least}
        found |= {name: None for name in prefixes if name >= least or least.startswith(name)}
        names = sorted(name for name in found if name > after)
        page = names[: min(PAGE, int(query.get("maxResults", PAGE)))]
        answer: dict[str, Any] = {"kind": "storage#objects"}
        answer["items"] = [found[name] for name in page if found[name]]
        answer["prefixes"] = [name for name in page if not found[name]]
        return answer | ({"nextPageToken": page[-1]} if len(page) < len(names) else {})

    def _upload(self, method: str, bucket: str, query: dict[str, str], body: bytes) -> None:
        if "upload_id" in query:
            self._session(method, query["upload_id"], body)
        meta: dict[str, Any] = {}
        if query.get("uploadType") == "resumable":
            meta = json.loads(body or b"{}")
        content = b""
        if query.get("uploadType") == "multipart":  # the emulator takes long for large ones
            meta, content = _multipart(self.headers["Content-Type"], body)
        key = query.get("name") or meta["name"]
        self._held_to(query.get("ifGenerationMatch"), bucket, key)
        if query.get("uploadType") == "resumable":
            name = f"session-{next(self._ids)}"
            self.gcs.sessions[name] = Session(bucket, key, meta, query.get("ifGenerationMatch"))
            where = f"http://{self.headers['Host']}{UPLOAD}{bucket}/o?uploadType=resumable&upload_id={name}"
            raise Answered(200, headers={"Location": where})
        if query.get("uploadType") == "multipart":
            try:
                made = self._create(Session(bucket, key, meta, None, [content]))
            except Conflict as e:
                raise Answered(400, failure(400, str(e), "invalid")) from e
            raise Answered(200, made)

    def _session(self, method: str, name: str, body: bytes) -> None:
        session = self.gcs.sessions.get(name)
        if session is None:
            raise Answered(404, failure(404, "No such upload session", "notFound"))
        if method == "DELETE":
            del self.gcs.sessions[name]
            raise Answered(499)
        if session.finished is not None:
            raise Answered(200, session.finished)
        span, _, total = self.headers["Content-Range"].removeprefix("bytes ").partition("/")
        if span != "*":
            begin, end = map(int, span.split("-"))
            last = total != "*" and end + 1 == int(total)
            if begin > session.held or end + 1 - begin != len(body) or (not last and len(body) % GCS_CHUNK_UNIT):
                raise Answered(400, failure(400, f"not a chunk that may be sent: {span}/{total}", "badRequest"))
            fresh = body[session.held - begin :]
            if fresh:
                session.chunks.append(fresh)
        if total == "*" or session.held < int(total):
            raise Answered(308, headers={"Range": f"bytes=0-{session.held - 1}"} if session.held else {})
        self._held_to(session.condition, session.bucket, session.key)
        session.finished = self._create(session)
        raise Answered(200, session.finished)

    def _create(self, session: Session) -> dict[str, Any]:
        private, content = cast(Any, objects), b"".join(session.chunks)
        session.chunks.clear()
        made = private._make_object_resource(
            self.gcs.endpoint,
            session.bucket,
            session.key,
            "application/octet-stream",
            str(len(content)),
            {**session.meta, "name": session.key},
        ) | ({"md5Hash": session.meta["md5Hash"]} if "md5Hash" in session.meta else {})
        made = private._checksums(content, made)
        self.storage.create_file(session.bucket, session.key, content, made)
        return made


@contextmanager
def gcs_emulator() -> Iterator[Gcs]:
    gcs = Gcs("", _Memory())
    gcs.renew()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, gcs)) as server:
        gcs.endpoint = f"http://127.0.0.1:{server.server_port}"
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield gcs
        finally:
            server.shutdown()
            thread.join()


if __name__ == "__main__":
    with gcs_emulator() as served:
        served.make_bucket("bench")
        print(served.endpoint, flush=True)
        sys.stdin.read()

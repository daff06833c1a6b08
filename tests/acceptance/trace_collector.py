"""A collector of traces that speaks OTLP over HTTP, as it is needed here."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector(ThreadingHTTPServer):
    """Keeps (service, span) of what is exported to it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Intake)
        self.spans: list[tuple[str, Any]] = []
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def traces(self) -> dict[int, dict[str, Any]]:
        """By seq: the spans of an item, by name; those of its last attempt."""
        found: dict[int, dict[str, Any]] = {}
        for _, span in self.spans:
            found.setdefault(attributes(span)["rollout.seq"], {})[span.name] = span
        return found


class Intake(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
        for resource in request.resource_spans:
            (service,) = [a.value.string_value for a in resource.resource.attributes if a.key == "service.name"]
            self.server.spans += [(service, span) for scope in resource.scope_spans for span in scope.spans]  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def attributes(span: Any) -> dict[str, Any]:
    return {
        a.key: a.value.int_value if a.value.HasField("int_value") else a.value.string_value for a in span.attributes
    }

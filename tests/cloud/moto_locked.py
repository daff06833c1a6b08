"""moto as a server in a thread, one request at a time: in parallel it loses messages (it puts back old lists)."""

from __future__ import annotations

import io
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import boto3
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto_sqs import polling
from rollout.config.cloud import CloudSection
from werkzeug.serving import WSGIRequestHandler, make_server

REGION = "eu-central-1"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_SESSION_TOKEN": "testing"}
_OTHERS = (
    "AWS_PROFILE",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_CONFIG_FILE",
)


_NUMBERS = itertools.count(1)  # what moto holds is of the process, not of a server
_BEGUN = b"2010-11-10T20:48:33.000Z"


class _Quiet(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, type: str, message: str, *args: Any) -> None:
        pass

    def handle(self) -> None:
        # of clients that go away in the middle, which is what some tests are about
        try:
            super().handle()
        except OSError:
            self.close_connection = True


@dataclass
class AwsEmulator:
    """`cloud()` is the section that goes there; `s3` and the others are boto3's clients, to look from outside."""

    endpoint: str
    clients: dict[str, Any] = field(default_factory=dict[str, Any])

    def cloud(self, **sections: Any) -> CloudSection:
        given = {"provider": "aws", "region": REGION, "endpoint_url": self.endpoint, **sections}
        return CloudSection.model_validate(given)

    def client(self, service: str) -> Any:
        if service not in self.clients:
            self.clients[service] = boto3.client(  # type: ignore[call-overload]
                service,
                endpoint_url=self.endpoint,
                region_name=REGION,
                aws_access_key_id="testing",
                aws_secret_access_key="testing",
            )
        return self.clients[service]

    @property
    def s3(self) -> Any:
        return self.client("s3")

    @property
    def sqs(self) -> Any:
        return self.client("sqs")

    def fresh(self, what: str) -> str:
        return f"{what}-{next(_NUMBERS)}"

    def bucket(self, name: str = "") -> str:
        name = name or self.fresh("bucket")
        self.s3.create_bucket(Bucket=name, CreateBucketConfiguration={"LocationConstraint": REGION})
        return name

    def queue(self, name: str = "", **attributes: str) -> str:
        """Its URL. Attributes as "VisibilityTimeout"."""
        return self.sqs.create_queue(QueueName=name or self.fresh("queue"), Attributes=attributes)["QueueUrl"]

    def secret(self, name: str, value: str) -> str:
        """Its ARN."""
        return self.client("secretsmanager").create_secret(Name=name, SecretString=value)["ARN"]

    def keys(self, bucket: str, prefix: str = "") -> list[str]:
        pages = self.s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        return [one["Key"] for page in pages for one in page.get("Contents", [])]

    def body(self, bucket: str, key: str) -> bytes:
        return self.s3.get_object(Bucket=bucket, Key=key)["Body"].read()

    def unfinished(self, bucket: str) -> list[str]:
        return [one["Key"] for one in self.s3.list_multipart_uploads(Bucket=bucket).get("Uploads", [])]

    def close(self) -> None:
        for client in self.clients.values():
            client.close()


def locked(application: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    """One request at a time; the body of each is read first, so that a slow sender holds nobody up."""
    lock = threading.Lock()

    def app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        length = environ.get("CONTENT_LENGTH")
        if length:
            body = environ["wsgi.input"].read(int(length))
            if len(body) < int(length):
                raise ConnectionError("the request was cut off")
            environ["wsgi.input"] = io.BytesIO(body)
        with lock:
            found = application(environ, start_response)
            try:
                body = b"".join(found)
                if "uploads" in environ.get("QUERY_STRING", ""):  # it says that each was begun in 2010
                    body = body.replace(_BEGUN, datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z").encode())
                return [body]
            finally:
                close = getattr(found, "close", None)
                if close is not None:
                    close()

    return app


@contextmanager
def aws_emulator() -> Iterator[AwsEmulator]:
    """Credentials and nothing else of AWS are in the environment meanwhile."""
    before = {name: os.environ.pop(name, None) for name in (*CREDENTIALS, *_OTHERS)}
    os.environ.update(CREDENTIALS, AWS_EC2_METADATA_DISABLED="true")
    server = make_server(
        "127.0.0.1",
        0,
        polling(locked(DomainDispatcherApplication(create_backend_app))),  # type: ignore[arg-type]
        threaded=True,
        request_handler=_Quiet,
    )
    server.daemon_threads = True  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    emulator = AwsEmulator(f"http://127.0.0.1:{server.port}")
    try:
        yield emulator
    finally:
        emulator.close()
        server.shutdown()
        thread.join()
        server.server_close()
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        os.environ.pop("AWS_EC2_METADATA_DISABLED", None)


if __name__ == "__main__":  # for benchmarks, whose clients want a processor of their own: until stdin ends
    with aws_emulator() as started:
        print(started.endpoint, flush=True)
        sys.stdin.read()

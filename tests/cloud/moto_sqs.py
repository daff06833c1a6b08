"""What moto leaves out of SQS: receipts that end, long polls that let others work meanwhile, a clock that is set."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from moto.core.utils import unix_time, unix_time_millis
from moto.sqs import models
from moto.sqs.exceptions import ReceiptHandleIsInvalid

POLL_S = 0.02


class Clock:
    """Seconds that moto's clock for SQS is ahead."""

    ahead_s = 0.0


@contextmanager
def strict_sqs() -> Iterator[Clock]:
    """Only the receipt of the present delivery extends or gives back, and only while its lease runs."""
    clock = Clock()
    change = models.SQSBackend.change_message_visibility

    def change_message_visibility(self: Any, queue_name: str, receipt_handle: str, visibility_timeout: int) -> None:
        for message in self.get_queue(queue_name)._messages:
            if message.had_receipt_handle(receipt_handle):
                if message.receipt_handle != receipt_handle or message.visible:
                    raise ReceiptHandleIsInvalid
                message.sent_timestamp = max(message.sent_timestamp, unix_time_millis() - 43_000_000)
        change(self, queue_name, receipt_handle, visibility_timeout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            models, "unix_time_millis", lambda *dt: unix_time_millis(*dt) + (0 if dt else clock.ahead_s * 1000)
        )
        patch.setattr(models, "unix_time", lambda *dt: unix_time(*dt) + (0 if dt else clock.ahead_s))
        patch.setattr(models.SQSBackend, "change_message_visibility", change_message_visibility)
        yield clock


Answer = Callable[[dict[str, Any], Any], Iterable[bytes]]


def polling(locked: Answer) -> Answer:
    """A long poll as many short ones: the lock on moto is free between them."""

    def app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if environ.get("HTTP_X_AMZ_TARGET") != "AmazonSQS.ReceiveMessage":
            return locked(environ, start_response)
        asked = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
        until = time.monotonic() + asked.get("WaitTimeSeconds", 0)
        body = json.dumps({**asked, "WaitTimeSeconds": 0}).encode()
        while True:
            started: list[Any] = []
            once = {**environ, "wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}
            answer = b"".join(locked(once, lambda *args, started=started: started.append(args)))
            if b'"MessageId"' in answer or not started[0][0].startswith("200") or time.monotonic() >= until:
                start_response(*started[0])
                return [answer]
            time.sleep(POLL_S)

    return app

"""Emulators of the providers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from api_calls import Calls, recorded
from cloud_fixtures import aws, aws_server, gcs, gcs_server
from moto_sqs import Clock, strict_sqs
from pubsub_emulator import Pubsub, pubsub_emulator, why_not
from pubsub_fake import FakePubsub, fake_pubsub

__all__ = ["aws", "aws_server", "gcs", "gcs_server"]


@pytest.fixture
def sqs_clock() -> Iterator[Clock]:
    with strict_sqs() as clock:
        yield clock


@pytest.fixture(scope="session")
def pubsub() -> Iterator[Pubsub]:
    """Google's emulator."""
    if why_not():
        pytest.skip(why_not())
    with pubsub_emulator() as emulator:
        yield emulator


@pytest.fixture
async def pubsub_fake() -> AsyncIterator[FakePubsub]:
    async with fake_pubsub() as fake:
        yield fake


@pytest.fixture(autouse=True)
def api_calls() -> Iterator[Calls]:
    """A call that deploy/iam.yaml has no row for fails the test that makes it."""
    with recorded() as calls:
        yield calls

"""Emulators of the providers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from api_calls import Calls, recorded
from gcs_emulator import Gcs, gcs_emulator
from moto_locked import AwsEmulator, aws_emulator
from moto_sqs import Clock, strict_sqs
from pubsub_emulator import Pubsub, pubsub_emulator, why_not
from pubsub_fake import FakePubsub, fake_pubsub


@pytest.fixture(scope="session")
def aws_server() -> Iterator[AwsEmulator]:
    with aws_emulator() as emulator:
        yield emulator


@pytest.fixture
def aws(aws_server: AwsEmulator) -> AwsEmulator:
    """Names of `bucket()` and `queue()` are fresh: what other tests left there is not in the way."""
    return aws_server


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[Gcs]:
    with gcs_emulator() as emulator:
        yield emulator


@pytest.fixture
def gcs(gcs_server: Gcs) -> Gcs:
    """With an empty bucket."""
    gcs_server.renew()
    return gcs_server


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

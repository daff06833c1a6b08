"""A ledger of each kind, and who writes to it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from cloud_fixtures import aws as aws
from cloud_fixtures import aws_server as aws_server
from cloud_fixtures import gcs as gcs
from cloud_fixtures import gcs_server as gcs_server
from ledger_rows import Writer
from objects_rig import rig as rig
from rollout.config.settings import StorageSection
from rollout_coordinator.ledger import Ledger, open_ledger


@pytest.fixture
async def ledger(storage_section: StorageSection) -> AsyncIterator[Ledger]:
    opened = open_ledger(storage_section)
    await opened.open()
    yield opened
    await opened.close()


@pytest.fixture
async def writer(ledger: Ledger) -> Writer:
    made = Writer(ledger)
    await made.lead()
    return made

"""Emulators of the providers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from api_calls import Calls, recorded
from cloud_fixtures import aws, aws_server, gcs, gcs_server

__all__ = ["aws", "aws_server", "gcs", "gcs_server"]


@pytest.fixture(autouse=True)
def api_calls() -> Iterator[Calls]:
    """A call that deploy/iam.yaml has no row for fails the test that makes it."""
    with recorded() as calls:
        yield calls

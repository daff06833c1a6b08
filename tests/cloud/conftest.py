"""Emulators of the providers."""

from __future__ import annotations

from cloud_fixtures import aws, aws_server, gcs, gcs_server

__all__ = ["aws", "aws_server", "gcs", "gcs_server"]

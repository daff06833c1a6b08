"""Secrets of Google Secret Manager: the latest version or a named one, read with `projects.secrets.versions.access`
(https://cloud.google.com/secret-manager/docs/reference/rest)."""

from __future__ import annotations

import base64
import re

from rollout.cloud.gcp import Gcp
from rollout.cloud.gcp_errors import Access
from rollout.config.cloud import CloudSection
from rollout.config.settings import SecretsSection
from rollout.model.errors import NotFoundError, RolloutError, UnavailableError
from rollout.secrets.cloud import CloudSecretStore

BUDGET_S = 15.0
"""Seconds for all attempts at one read; a process waits for its secrets before it starts."""
NAMING = (
    "letters, digits, _ and - , with /versions/N for one version, and projects/PROJECT/secrets/ before it for another "
    "project; NAME#KEY for a key of a JSON object"
)
ACCESS = Access("secretmanager.versions.access", "roles/secretmanager.secretAccessor", "[cloud.secrets] allowlist")
_NAME = re.compile(
    r"(projects/(?P<project>[a-z0-9:.-]+)/secrets/)?(?P<name>[A-Za-z0-9_-]{1,255})(/versions/(?P<version>[A-Za-z0-9_-]+))?"
)


def open_store(section: SecretsSection, cloud: CloudSection) -> CloudSecretStore:
    """Return the store. Raises ConfigError if the list has an invalid name, or the SDK is missing (at the first
    read)."""
    gcp = Gcp(cloud)

    async def read(name: str) -> bytes:
        return await _read(gcp, name)

    names = [*cloud.secrets.allowlist, *section.allow]
    return CloudSecretStore(read, gcp.close, names, cloud.secrets.ttl_secs, accepts=_is_name, naming=NAMING)


def _is_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


async def _read(gcp: Gcp, name: str) -> bytes:
    parts = _NAME.fullmatch(name)
    assert parts is not None  # the list was checked
    project = parts["project"] or await gcp.project()
    version = parts["version"] or "latest"
    url = f"{gcp.endpoint('secretmanager')}/v1/projects/{project}/secrets/{parts['name']}/versions/{version}:access"
    what = f"secret {name!r} of [cloud.secrets] allowlist cannot be read"
    try:
        answer = await gcp.request("GET", url, what=what, budget_s=BUDGET_S, access=ACCESS)
    except NotFoundError as error:
        raise UnavailableError(
            f"{error.message.rstrip('.')}; make it in project {project}, add a version, or mend the name: "
            f"gcloud secrets create {parts['name']} --data-file=FILE",
            failure="missing",
        ) from None
    except RolloutError as error:
        if "DISABLED" in error.message or "DESTROYED" in error.message:
            remedy = f"enable it, gcloud secrets versions enable {version} --secret={parts['name']}, or add a newer one"
            raise UnavailableError(f"{error.message.rstrip('.')}; {remedy}", failure="missing") from None
        raise
    try:
        return base64.b64decode(answer.json()["payload"].get("data", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UnavailableError(
            f"{what}: what answers at {url} is not Secret Manager (a proxy, endpoint_url?)"
        ) from None

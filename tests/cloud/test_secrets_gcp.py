"""Google Secret Manager: there is no emulator of Google's, so a small server answers as the REST API does."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator

import pytest
from metadata_server import Answer, Served, serving
from rollout.config.cloud import CloudSection
from rollout.config.settings import SecretsSection
from rollout.model.errors import ConfigError, UnavailableError
from rollout.secrets import SecretStore, open_secrets


class SecretManager(Served):
    """`secrets`: values by version, the last is the latest; None: disabled. `forbidden`: those that are refused."""

    def __init__(self) -> None:
        super().__init__()
        self.secrets: dict[str, list[bytes | None]] = {}
        self.forbidden: set[str] = set()

    async def answer(self, method: str, path: str, headers: dict[str, str]) -> Answer:
        assert method == "GET"
        assert path.endswith(":access")
        _, _, _, project, _, name, _, version = path.removesuffix(":access").split("/")
        if name in self.forbidden:
            return self._error(403, "PERMISSION_DENIED", "Permission denied on resource")
        versions = self.secrets.get(name, [])
        number = len(versions) if version == "latest" else int(version)
        if project != "proj-1" or not 0 < number <= len(versions):
            return self._error(404, "NOT_FOUND", f"Secret [{name}] not found or has no versions.")
        value = versions[number - 1]
        if value is None:
            return self._error(400, "FAILED_PRECONDITION", f"Secret Version [{name}] is in DISABLED state.")
        return 200, {}, json.dumps({"payload": {"data": base64.b64encode(value).decode()}})

    def _error(self, status: int, kind: str, message: str) -> Answer:
        return status, {}, json.dumps({"error": {"code": status, "status": kind, "message": message}})


@pytest.fixture
async def manager() -> AsyncIterator[SecretManager]:
    served = SecretManager()
    async with serving(served):
        yield served


def store_of(manager: SecretManager, *names: str) -> SecretStore:
    section = {
        "provider": "gcp", "project": "proj-1", "endpoint_url": manager.address, "secrets": {"allowlist": list(names)}
    }  # fmt: skip
    return open_secrets(SecretsSection(), CloudSection.model_validate(section))


async def test_the_latest_version_or_the_one_that_is_named(manager: SecretManager) -> None:
    manager.secrets = {"hf-token": [b"sesame-one", b"sesame-two"], "login": [b'{"user": "anne"}']}
    for name, value in {
        "hf-token": "sesame-two",
        "hf-token/versions/1": "sesame-one",
        "projects/proj-1/secrets/hf-token/versions/2": "sesame-two",
        "login#user": "anne",
    }.items():
        store = store_of(manager, name)
        assert await store.get(name) == value
        await store.close()


async def test_what_cannot_be_read_names_the_remedy(manager: SecretManager) -> None:
    manager.secrets = {"off": [None], "secret": [b"x"], "bytes": [b"\xff"]}
    manager.forbidden = {"secret"}
    store = store_of(manager, "none", "off", "secret", "bytes")
    with pytest.raises(UnavailableError, match=r"'none'.*project proj-1.*gcloud secrets create none"):
        await store.get("none")
    with pytest.raises(UnavailableError, match=r"'off'.*versions enable latest --secret=off"):
        await store.get("off")
    permission = r"secretmanager.versions.access .*roles/secretmanager.secretAccessor.*\[cloud.secrets\] allowlist"
    with pytest.raises(ConfigError, match=f"'secret'.*{permission}"):
        await store.get("secret")
    with pytest.raises(ConfigError, match="is binary"):
        await store.get("bytes")
    await store.close()


def test_names_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="'a/b' cannot be the name of a secret: letters"):
        open_secrets(SecretsSection(backend="gcp", allow=["a/b"]), CloudSection(provider="gcp"))

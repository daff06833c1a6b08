"""Secrets from the environment, by allowlist."""

from __future__ import annotations

import pytest
from rollout.config.settings import SecretsSection
from rollout.model.errors import ConfigError, UnavailableError
from rollout.secrets import open_secrets
from rollout.secrets.env import EnvSecretStore


async def test_allowed_and_set() -> None:
    store = EnvSecretStore(["hf_token"], {"ROLLOUT_SECRET_HF_TOKEN": "abc"})
    assert await store.get("hf_token") == "abc"
    await store.close()


async def test_not_on_the_list_is_a_configuration_error() -> None:
    store = EnvSecretStore(["other"], {"ROLLOUT_SECRET_HF_TOKEN": "abc"})
    with pytest.raises(ConfigError, match="not in the allowlist") as caught:
        await store.get("hf_token")
    assert not caught.value.retryable


async def test_allowed_but_unset_may_be_provisioned_later() -> None:
    environ: dict[str, str] = {}
    store = EnvSecretStore(["hf_token"], environ)
    with pytest.raises(UnavailableError, match="set ROLLOUT_SECRET_HF_TOKEN") as caught:
        await store.get("hf_token")
    assert caught.value.retryable
    environ["ROLLOUT_SECRET_HF_TOKEN"] = "abc"
    assert await store.get("hf_token") == "abc"


def test_there_is_no_put() -> None:
    assert not hasattr(EnvSecretStore([]), "put")


@pytest.mark.parametrize("name", ["", "a b", "x=1", "ROLLOUT_SECRET_TOKEN"])
def test_impossible_names(name: str) -> None:
    with pytest.raises(ConfigError, match="secrets"):
        EnvSecretStore([name])


async def test_opening_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_SECRET_TOKEN", "x")
    assert await open_secrets(SecretsSection(allow=["token"])).get("token") == "x"
    with pytest.raises(ConfigError, match="known: env"):
        open_secrets(SecretsSection(backend="vault"))

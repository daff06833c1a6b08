"""Secrets from the environment, by allowlist."""

from __future__ import annotations

import pytest
from rollout.config.logging import redact_text
from rollout.config.settings import SecretsSection
from rollout.model.errors import ConfigError, UnavailableError
from rollout.secrets import open_secrets
from rollout.secrets.env import EnvSecretStore
from rollout_worker.environment import AllowedSecrets, child_environment


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


async def test_what_an_executors_process_is_given() -> None:
    """Allowed and set; asked anew for each process; hidden in what this one writes from then on."""
    environ = {"ROLLOUT_SECRET_HF_TOKEN": "sesame-1", "ROLLOUT_SECRET_OTHER": "sesame-2"}
    secrets = AllowedSecrets(EnvSecretStore(["HF_TOKEN", "LATER"], environ), ["HF_TOKEN", "LATER"])
    assert await secrets.read() == {"HF_TOKEN": "sesame-1"}
    environ["ROLLOUT_SECRET_LATER"] = "sesame-3"
    assert await secrets.read() == {"HF_TOKEN": "sesame-1", "LATER": "sesame-3"}
    assert redact_text("sesame-1 sesame-2 sesame-3") == "*** sesame-2 ***"
    await secrets.close()


def test_the_environment_of_children(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ROLLOUT_SECRET_HF_TOKEN": "x", "ROLLOUT_PARENT_FD": "7", "PLAIN": "p", "BOTH": "old"}.items():
        monkeypatch.setenv(name, value)
    found = child_environment({"BOTH": "new"})
    assert (found["PLAIN"], found["BOTH"]) == ("p", "new")
    assert not [name for name in found if name.startswith("ROLLOUT_SECRET_") or name == "ROLLOUT_PARENT_FD"]

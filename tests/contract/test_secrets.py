"""Secrets from the environment and from a provider, by allowlist."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from rollout.config.cloud import CloudSection
from rollout.config.load import load_settings
from rollout.config.logging import redact_text
from rollout.config.secret_names import variable_of
from rollout.config.settings import SecretsSection, WorkerSettings
from rollout.model.errors import AttemptError, ConfigError, NotFoundError, RolloutError, UnavailableError
from rollout.secrets import backend_of, open_secrets
from rollout.secrets.cloud import RETRY_S, STALE_S, CloudSecretStore
from rollout.secrets.env import EnvSecretStore
from rollout_worker import session_events as ev
from rollout_worker.attempts import Plan
from rollout_worker.environment import AllowedSecrets, child_environment
from rollout_worker.executors.port import Run
from rollout_worker.processes.child import ChildProcess, Handlers


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
    with pytest.raises(ConfigError, match="known: aws, env, gcp"):
        open_secrets(SecretsSection(backend="vault"))


async def test_what_an_executors_process_is_given() -> None:
    """Allowed and set; asked anew for each process; hidden in what this one writes from then on."""
    environ = {"ROLLOUT_SECRET_HF_TOKEN": "sesame-1", "ROLLOUT_SECRET_OTHER": "sesame-2"}
    secrets = AllowedSecrets(EnvSecretStore(["HF_TOKEN", "LATER"], environ))
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


# ---- a provider's


class Service:
    """Answers with what is in `values`; else raises `error`."""

    def __init__(self, **values: bytes) -> None:
        self.values = values
        self.error: RolloutError = NotFoundError("there is none")
        self.reads = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.now = 0.0

    async def read(self, name: str) -> bytes:
        self.reads += 1
        await self.gate.wait()
        if name not in self.values:
            raise self.error
        return self.values[name]

    async def close(self) -> None:
        self.reads = -1

    def store(self, *names: str, ttl_s: float = 100.0) -> CloudSecretStore:
        return CloudSecretStore(
            self.read, self.close, names, ttl_s, accepts=lambda n: "!" not in n, naming="no !", clock=lambda: self.now
        )


async def test_a_value_is_read_once_by_many_and_again_after_its_time() -> None:
    service = Service(token=b"sesame-one")
    store = service.store("token")
    service.gate.clear()
    asking = [asyncio.create_task(store.get("token")) for _ in range(20)]
    await asyncio.sleep(0)
    asking[0].cancel()  # the one that began the reading gives up
    await asyncio.sleep(0)
    service.gate.set()
    found = await asyncio.gather(*asking, return_exceptions=True)
    assert found[1:] == ["sesame-one"] * 19
    assert service.reads == 1
    service.values["token"] = b"sesame-two"
    service.now = 89
    assert await store.get("token") == "sesame-one"
    service.now = 101
    assert await store.get("token") == "sesame-two"
    assert redact_text("sesame-one sesame-two") == "*** ***"
    assert not hasattr(store, "put")
    assert "sesame" not in repr(store) + repr(vars(store))
    await store.close()


async def test_while_the_service_is_away_the_last_value_serves_for_a_bounded_time() -> None:
    service = Service(token=b"sesame-one")
    store = service.store("token")
    await store.get("token")
    del service.values["token"]
    service.error = UnavailableError("away")
    service.now = 200
    assert await store.get("token") == "sesame-one"
    assert await store.get("token") == "sesame-one"
    assert service.reads == 2  # not asked at each call
    service.now = 200 + RETRY_S
    assert await store.get("token") == "sesame-one"
    assert service.reads == 3
    service.now = 101 + STALE_S
    with pytest.raises(UnavailableError, match="away"):
        await store.get("token")


@pytest.mark.parametrize("error", [ConfigError("forbidden"), UnavailableError("deleted", failure="missing")])
async def test_a_secret_that_is_gone_or_forbidden_serves_no_longer(error: RolloutError) -> None:
    service = Service(token=b"sesame-one")
    store = service.store("token")
    await store.get("token")
    service.now = 200
    del service.values["token"]
    service.error = ConfigError("the credentials have expired", failure="credentials")
    assert await store.get("token") == "sesame-one"
    service.now = 300
    service.error = error
    with pytest.raises(type(error), match=error.message):
        await store.get("token")
    service.error = UnavailableError("away")
    with pytest.raises(UnavailableError, match="away"):  # no older value comes back
        await store.get("token")


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (b"plain", "plain"),
        (b"of echo\n", "of echo"),
        (b"\xff\xfe", "is binary"),
        (b"a\0b", "a NUL"),
        (b"", "is empty"),
    ],
)
async def test_what_a_value_may_be(value: bytes, found: str) -> None:
    store = Service(token=value).store("token")
    try:
        assert await store.get("token") == found
    except RolloutError as error:
        assert found in error.message


async def test_a_key_of_a_json_secret() -> None:
    service = Service(db=b'{"user": "anne", "port": 5432}', text=b"sesame-one")
    store = service.store("db#user", "db#port", "db#none", "text#key")
    assert await store.get("db#user") == "anne"
    assert await store.get("db#port") == "5432"
    assert service.reads == 1
    with pytest.raises(ConfigError, match="has no key 'none'"):
        await store.get("db#none")
    with pytest.raises(ConfigError, match="is not JSON") as caught:
        await store.get("text#key")
    assert "sesame" not in caught.value.message
    with pytest.raises(ConfigError, match=r"\[cloud.secrets\] allowlist"):
        await store.get("db")


@pytest.mark.parametrize(
    ("name", "variable"),
    [
        ("rollout/hf-token", "HF_TOKEN"),
        ("hf_token", "HF_TOKEN"),
        ("rollout/db#user name", "DB_USER_NAME"),
        ("arn:aws:secretsmanager:us-west-2:123456789012:secret:rollout/hf-token-AbCdEf", "HF_TOKEN"),
        ("projects/p/secrets/hf-token/versions/3", "HF_TOKEN"),
        ("a/3rd.key", "_3RD_KEY"),
    ],
)
def test_the_variable_of_a_name(name: str, variable: str) -> None:
    assert variable_of(name) == variable


def test_two_names_of_one_variable_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'a/token' and 'b/token' .*TOKEN"):
        Service().store("a/token", "b/token")
    with pytest.raises(ConfigError, match=r"'bad!' .*no !"):
        Service().store("bad!")


@pytest.mark.parametrize("section", ['[cloud]\nprovider = "aws"\n[cloud.secrets]\nallowlist', "[secrets]\nallow"])
@pytest.mark.parametrize(
    "value",
    [
        "hf_AbCdEfGhIjKlMnOpQrStUvWxYz01234567",
        "sk-proj-0123456789abcdefghij",
        "TOKEN=sesame-one",
        "two words",
        "AKIAIOSFODNN7EXAMPLE",
        "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY12",
    ],
)
def test_a_value_in_a_list_of_names_is_refused_and_not_shown(tmp_path: Path, section: str, value: str) -> None:
    file = tmp_path / "worker.toml"
    file.write_text(f'{section} = ["rollout/hf-token", "{value}"]\n')
    with pytest.raises(ConfigError, match=r"worker.toml:\d.*value of a secret") as caught:
        load_settings(WorkerSettings, file)
    assert value not in caught.value.message


@pytest.mark.parametrize(
    "name",
    ["hf_token_for_project_1", "rollout/hf_token-production-2", "sk-learn-artifacts-token-2024", "team/db=1"],
)
def test_a_name_that_looks_a_little_like_a_value_is_a_name(tmp_path: Path, name: str) -> None:
    file = tmp_path / "worker.toml"
    file.write_text(f'[cloud]\nprovider = "aws"\n[cloud.secrets]\nallowlist = ["{name}"]\n')
    settings = load_settings(WorkerSettings, file)
    assert list(open_secrets(settings.secrets, settings.cloud).allowed.values()) == [name]


@pytest.mark.parametrize("name", ["a/path", "ld-preload", "pythonpath", "x/rollout-worker-name", "home"])
def test_a_secret_in_a_variable_that_processes_are_started_by_is_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / "worker.toml"
    file.write_text(f'[cloud]\nprovider = "aws"\n[cloud.secrets]\nallowlist = ["python-token", "{name}"]\n')
    with pytest.raises(
        ConfigError, match=rf"worker.toml:4.*allowlist.*{name}' would be the variable {variable_of(name)}"
    ):
        load_settings(WorkerSettings, file)
    with pytest.raises(ConfigError, match="would be the variable"):
        Service().store(name)


def test_which_backend() -> None:
    aws = CloudSection.model_validate({"provider": "aws", "secrets": {"allowlist": ["a"]}})
    assert backend_of(SecretsSection(), aws) == "aws"
    assert backend_of(SecretsSection(backend="env"), aws) == "env"
    assert backend_of(SecretsSection(allow=["a"]), CloudSection(provider="aws")) == "env"
    assert backend_of(SecretsSection()) == "env"
    with pytest.raises(ConfigError, match=r'needs \[cloud\] provider = "gcp"; it is "aws"'):
        backend_of(SecretsSection(backend="gcp"), aws)


async def test_all_secrets_that_cannot_be_read_are_told_at_once() -> None:
    service = Service(good=b"sesame-one")
    service.error = UnavailableError("'bad' cannot be read: allow secretsmanager:GetSecretValue")
    secrets = AllowedSecrets(service.store("good", "bad", "other"))
    with pytest.raises(AttemptError, match=r"GetSecretValue.*; .*GetSecretValue") as caught:
        await secrets.read()
    assert (caught.value.error_code, caught.value.retry) == ("secret_not_set", True)
    service.values |= {"bad": b"x", "other": b"y"}
    assert await secrets.read() == {"GOOD": "sesame-one", "BAD": "x", "OTHER": "y"}


async def test_a_process_that_lacks_its_secrets_does_not_start_and_says_why(tmp_path: Path) -> None:
    """As a cause: the attempts that wait for it go back and pay nothing."""
    told: list[ev.Event] = []
    service = Service()
    service.error = ConfigError("'token' cannot be read: allow secretsmanager:GetSecretValue")
    secrets = AllowedSecrets(service.store("token"))
    unused: Any = None
    plan = Plan(Run("R", "map", {}), "slot", "k")
    handlers = Handlers(told.append, unused, secrets.read)
    await ChildProcess(ev.StartChild(1, plan), tmp_path, tmp_path, unused, handlers).run()
    failed, ended = told
    assert isinstance(failed, ev.ChildFailed) and isinstance(ended, ev.ChildEnded)
    assert (failed.failure.code, failed.failure.retryable) == ("secret_not_set", False)
    assert "secretsmanager:GetSecretValue" in failed.failure.message


async def test_a_process_ends_for_its_worker_whatever_error_keeps_it_from_starting(tmp_path: Path) -> None:
    """Its place and its devices are free then."""
    told: list[ev.Event] = []

    async def fails() -> dict[str, str]:
        raise KeyError("payload")

    unused: Any = None
    child = ChildProcess(
        ev.StartChild(1, Plan(Run("R", "map", {}), "slot", "k")), tmp_path, tmp_path, unused,
        Handlers(told.append, unused, fails),
    )  # fmt: skip
    with pytest.raises(KeyError):
        await child.run()
    assert [type(event) for event in told] == [ev.ChildEnded] and child.done.is_set()

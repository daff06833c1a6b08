"""Where a join token comes from, and how much of it there may be; numbers that no configuration means."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rollout.cli.__main__ import app as operator_app
from rollout.cli.tokens import VARIABLE, find_token
from rollout.config.load import load_settings
from rollout.config.settings import CoordinatorSettings, WorkerSettings
from rollout.model.errors import ConfigError, InputError, UnavailableError
from rollout.security.roles import Role
from rollout.security.tokens import Token, check_bounds, format_token
from rollout_coordinator.__main__ import app
from rollout_worker.__main__ import app as worker_app
from typer.testing import CliRunner


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--uses", "0"], "--uses: a token lets 1 to 10000 hosts in, not 0"),
        (["--uses", "99999999999999999999"], "--uses: a token lets 1 to 10000 hosts in, not 99999999999999999999"),
        (["--ttl", "99999999d"], "--ttl: a token lives 1 second to 30 days, not 1e+08 days"),
        (["--ttl", "31d"], "not 31 days"),
        (["--ttl", "0s"], "not 0 seconds"),
        (["--ttl", "9" * 400 + "d"], "not inf days"),
        (["--ttl", "-1d"], "'-1d' is no duration"),
    ],
)
def test_a_token_is_bounded(tmp_path: Path, arguments: list[str], message: str) -> None:
    config = tmp_path / "coordinator.toml"
    config.write_text(f'[storage.embedded]\npath = "{tmp_path}/rollout.db"\n')
    done = CliRunner().invoke(app, ["token", "create", "--role", "worker", "--config", str(config), *arguments])
    assert isinstance(done.exception, ConfigError | InputError) and message in done.exception.message, done
    assert not (tmp_path / "rollout.db").exists()


def test_the_bounds_themselves_are_taken() -> None:
    check_bounds(1, 1)
    check_bounds(30 * 86400, 10_000)


def test_a_token_comes_from_the_command_a_file_standard_input_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text("rj1.file\n")
    monkeypatch.setenv(VARIABLE, "rj1.variable")
    monkeypatch.setattr("sys.stdin", io.StringIO("rj1.stdin\nmore"))
    assert find_token("rj1.word", None) == "rj1.word"
    assert find_token("", file).strip() == "rj1.file"
    assert find_token("", Path("-")).strip() == "rj1.stdin"
    assert find_token("", None) == "rj1.variable"


def test_no_token_says_where_one_may_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=r"--token-file FILE.*ROLLOUT_JOIN_TOKEN"):
        find_token("", None)
    with pytest.raises(ConfigError, match="none: cannot be read: No such file"):
        find_token("", tmp_path / "none")
    with pytest.raises(ConfigError, match="both given"):
        find_token("rj1", tmp_path / "none")
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match="the file is empty"):
        find_token("", tmp_path / "empty")


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ("transport", "certificate_lifetime_s = 1e300"),
        ("transport", "orphan_grace_ms = 9999999999999999999"),
        ("transport", "coordinator_failure_timeout_ms = 99999999999"),
        ("worker", "start_timeout_s = inf"),
        ("worker", "drain_budget_s = nan"),
        ("worker.capacity", "licences = 1e300"),
        ("worker.capacity", "licences = -1.0"),
        ("objects", "cache_max_mib = 99999999999999999999"),
    ],
)
def test_numbers_beyond_reason_are_faults(tmp_path: Path, section: str, line: str) -> None:
    config = tmp_path / "node.toml"
    config.write_text(f"[{section}]\n{line}\n")
    settings = WorkerSettings if section.startswith("worker") else CoordinatorSettings
    with pytest.raises(ConfigError, match=rf"node.toml:2: .*{line.split()[0]}.*must be"):
        load_settings(settings, config)


PROGRAMS = {Role.OPERATOR: operator_app, Role.WORKER: worker_app, Role.COORDINATOR: app}


@pytest.mark.parametrize("own", Role)
@pytest.mark.parametrize("wanted", Role)
def test_a_token_of_another_role_is_refused_before_it_is_sent(own: Role, wanted: Role) -> None:
    token = format_token(Token(own, "a" * 26, b"\0" * 32))
    ran = CliRunner().invoke(PROGRAMS[wanted], ["join", "--coordinator", "127.0.0.1:1", "--token", token])
    if own is wanted:
        assert isinstance(ran.exception, UnavailableError)  # nobody is there
        return
    other = "rollout" if own is Role.OPERATOR else f"rollout-{own}"
    assert isinstance(ran.exception, ConfigError)
    assert f"--role {wanted}`" in ran.exception.message and f"`{other} join`" in ran.exception.message

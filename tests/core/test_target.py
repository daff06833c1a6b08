"""Which cluster is named: the order, contradictions, contexts; what a wait and its end say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rollout.cli.commands.context import keep_joined
from rollout.cli.waits import Waits
from rollout.client.contexts import Context, Contexts
from rollout.client.runs import Runs
from rollout.client.target import ClusterSelector, Target, as_joined, connected, find_target, need_target
from rollout.config.settings import TransportSection
from rollout.model.errors import ConfigError, NotFoundError, NotLeaderError, UnavailableError
from rollout.security import files
from rollout.wire.answers import Answers, no_answer


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("ROLLOUT_COORDINATOR", "ROLLOUT_CONTEXT", "ROLLOUT_TLS_DIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def joined(directory: Path, *addresses: str, cluster: str = "prod") -> Path:
    directory.mkdir(parents=True)
    (directory / "host.pem").touch()
    told = {"cluster": cluster, "coordinator_addrs": list(addresses), "host_id": "h", "role": "operator"}
    (directory / files.JOINED).write_text(json.dumps(told))
    return directory


def context(name: str, directory: Path, *, use: bool = False) -> None:
    contexts = Contexts.read()
    contexts.add(name, Context(tls_dir=str(directory)), use=use)
    contexts.write()


def private(output: Path) -> Path:
    state = output / ".rollout"
    state.mkdir(parents=True)
    for name in ("rollout.db", "coordinator.toml"):
        (state / name).touch()
    return state


def test_what_is_named_nearest_counts(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the last of the order to the first."""
    assert find_target(None, None).addresses == []
    context("far", joined(place / "far", "far:1"), use=True)
    assert (find_target(None, None).addresses, find_target(None, None).why) == (["far:1"], "context far")
    joined(place / "data" / "tls", "here:1")
    assert find_target(None, None).why == "joined; ./data/tls"
    (place / "rollout.toml").write_text('[transport]\ncoordinator_addrs = ["file:1"]\n')
    assert find_target(None, None).addresses == ["file:1", "here:1"]  # the named one may be down
    monkeypatch.setenv("ROLLOUT_CONTEXT", "far")
    assert find_target(None, None).addresses == ["far:1"]
    monkeypatch.setenv("ROLLOUT_COORDINATOR", "env:1")
    assert find_target(None, None).addresses == ["env:1", "here:1"]
    assert find_target(None, None, ClusterSelector(context="far")).addresses == ["far:1"]
    assert find_target(["option:1"], None).addresses[0] == "option:1"
    assert find_target(None, None, ClusterSelector(local=True)).addresses == []


def test_a_private_cluster_is_that_of_the_directory(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="which cluster"):
        need_target(None, None)
    first = private(place / "one")
    assert need_target(None, None).private == Path("one/.rollout")
    private(place / "two")
    with pytest.raises(ConfigError, match="2 directories here") as caught:
        need_target(None, None)
    assert "--dir one" in caught.value.message and "--dir two" in caught.value.message
    assert need_target(None, None, ClusterSelector(directory=Path("two"))).private == Path("two/.rollout")
    joined(place / "data" / "tls", "here:1")
    assert need_target(None, None).addresses == ["here:1"]
    monkeypatch.chdir(first.parent)
    assert need_target(None, None).private == Path(".rollout")
    context("gone", place / "removed", use=True)
    assert need_target(None, None).private == Path(".rollout"), "whatever has become of the context in use"
    assert need_target(["there:1"], None).private is None
    with pytest.raises(ConfigError, match="no private cluster has run there"):
        need_target(None, None, ClusterSelector(directory=Path("..")))


def test_the_directory_of_a_coordinator_is_no_private_cluster(place: Path) -> None:
    """Its files have the same names: a command in it would start a private coordinator over them."""
    for name in ("rollout.db", "coordinator.toml"):
        (place / name).touch()
    joined(place / "data" / "tls", "here:1")
    assert need_target(None, None).addresses == ["here:1"]
    with pytest.raises(ConfigError):
        need_target(None, None, ClusterSelector(directory=place))


def test_options_that_contradict_are_refused() -> None:
    with pytest.raises(ConfigError, match="--coordinator and --local "):
        find_target(["a:1"], None, ClusterSelector(local=True))


def test_an_address_finds_its_context(place: Path) -> None:
    """So that `--coordinator` is enough where the cluster was joined from another directory."""
    context("far", joined(place / "far", "far:1", "spare:1"))
    found = find_target(["spare:1"], None)
    assert (found.tls_dir, found.cluster, found.addresses) == (place / "far", "prod", ["spare:1", "far:1"])


@pytest.mark.parametrize("name", ["", "-x", "a b", "a/b", "x" * 64])
def test_a_context_has_a_name_that_can_be_typed(name: str, place: Path) -> None:
    with pytest.raises(ConfigError, match="a name has letters"):
        context(name, place)


@pytest.mark.parametrize(
    "told", [{"coordinator_addrs": 5}, {"coordinator_addrs": ["nonsense"]}, {"cluster": ["x"]}, [], "{"]
)
def test_a_join_file_that_holds_something_else_is_a_located_error(told: object, place: Path) -> None:
    directory = joined(place / "data" / "tls")
    (directory / files.JOINED).write_text(told if isinstance(told, str) else json.dumps(told))
    with pytest.raises(ConfigError, match=r"tls/join\.json"):
        find_target(None, None)


def test_clusters_that_are_called_the_same_have_contexts_of_their_own(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("first", "second"):
        (joined(place / name, f"{name}:1") / files.CA).write_text(name)
        keep_joined("", "prod", place / name)
    keep_joined("", "prod", place / "first")  # joined again
    assert find_target(None, None).addresses == ["first:1"]
    assert find_target(None, None, ClusterSelector(context="prod-2")).addresses == ["second:1"]
    keep_joined("prod", "prod", place / "second")  # as it was told to
    assert list(Contexts.read().known) == ["prod", "prod-2"] and find_target(None, None).addresses == ["second:1"]
    assert "context prod-2 (" in capsys.readouterr().out


def test_a_context_that_is_not_there_names_those_that_are(place: Path) -> None:
    context("far", place)
    with pytest.raises(NotFoundError, match="known: far"):
        Contexts.read().get("near")
    with pytest.raises(ConfigError, match="no coordinator is known in"):
        find_target(None, None, ClusterSelector(context="far"))


def test_a_cluster_that_tells_of_other_coordinators_is_kept(place: Path) -> None:
    home = joined(place / "tls", "a:1")
    files.keep_addresses(home, ["a:1", "b:1"])
    assert files.joined(home) == {
        "cluster": "prod", "coordinator_addrs": ["a:1", "b:1"], "host_id": "h", "role": "operator"
    }  # fmt: skip
    files.keep_addresses(home, ["b:1"])  # a:1 was down
    assert (files.joined(home)["coordinator_addrs"], files.former_addresses(home)) == (["b:1"], ["a:1"])
    transport = TransportSection(tls_dir=str(home))
    assert as_joined(transport).coordinator_addrs == ["b:1"]
    assert as_joined(transport, also_former=True).coordinator_addrs == ["b:1", "a:1"]
    files.keep_addresses(home, ["c:1"])
    assert files.former_addresses(home) == ["b:1", "a:1"]
    files.keep_addresses(home, ["a:1", "b:1", "c:1"])
    assert "former_addrs" not in files.joined(home)
    files.keep_addresses(place / "none", ["a:1"])
    assert not (place / "none").exists()  # where nobody joined nothing is made


async def test_where_no_present_coordinator_answers_former_ones_are_asked(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def connect(addresses: list[str], **_: object) -> Runs:
        asked.extend(addresses)
        raise UnavailableError("nobody")

    monkeypatch.setattr(Runs, "connect", connect)
    files.keep_addresses(joined(place / "tls", "a:1"), ["b:1"])
    target = find_target(None, place / "tls")
    assert str(target).startswith('cluster "prod" at b:1 (')
    with pytest.raises(UnavailableError):
        async with connected(target):
            raise AssertionError
    assert asked == ["b:1", "a:1"]


def test_a_wait_is_told_of_after_two_seconds_and_then_now_and_then() -> None:
    said: list[str] = []
    now = 0.0
    waits = Waits(said.append, "a:1 (--coordinator)", lambda: said.append("cluster prod at a:1"), lambda: now)
    for seconds in (0.5, 1.9, 2.1, 10, 20, 21, 23, 30, 44, 58, 72, 82, 90):
        now = seconds
        waits.trouble(UnavailableError("a:1 refuses", tries_s=30.0), seconds)
    now = 91
    waits.trouble(None, 91)
    for _ in range(2):
        waits.answered()
        waits.trouble(UnavailableError("a:1 refuses"), 1)
    waits.trouble(UnavailableError("a:1 has not answered yet"), 2)
    waits.trouble(None, 3)
    waits.trouble(UnavailableError("a:1 refuses", tries_s=900.0), 3)
    waits.trouble(None, 4)
    assert said == [
        "asking a:1 (--coordinator)",
        "a:1 refuses; trying again for 28 s",
        "still, for 23 s: a:1 refuses; trying again for 7 s",
        "still, for 90 s: a:1 refuses; trying again",
        "the cluster answers, after 91 s",
        "cluster prod at a:1",
        "a:1 has not answered yet; waiting",
        "the cluster answers again, after 3 s",
        "a:1 refuses; trying again",
        "the cluster answers again, after 4 s",
    ]


def test_a_wait_over_several_calls_is_one_wait() -> None:
    """Each call counts from its own beginning, and one that hangs has a deadline."""
    said: list[str] = []
    now = 0.0
    waits = Waits(said.append, clock=lambda: now)
    for at, seconds in ((2, 2), (15, 15), (28, 28), (30, 0), (44, 14), (46, 16)):
        now = at
        waits.trouble(UnavailableError("a:1 has not answered yet"), seconds)
    waits.trouble(None, 16)
    now = 50
    waits.trouble(UnavailableError("a:1 refuses"), 2.5)
    waits.trouble(None, 2.6)
    assert said == [
        "a:1 has not answered yet; waiting",
        "still, for 28 s: a:1 has not answered yet; waiting",
        "the cluster answers again, after 46 s",
        "a:1 refuses; waiting",
        "the cluster answers again, after 3 s",
    ]


def test_what_coordinators_answer_is_one_cause() -> None:
    answers = Answers()
    refused = UnavailableError("failed to connect: Connection refused")
    answers.note("a:1", refused)
    assert answers.refused(["a:1"]) and not answers.refused(["a:1", "b:1"])
    assert answers.text() == "a:1 refuses connections: no coordinator listens there (yet), or the address is wrong"
    answers.note("b:1", NotLeaderError(leader="a:1"))
    assert answers.text() == (
        "nobody leads at present: a:1 refuses connections; b:1 is a standby and takes a:1 for the leader"
    )
    answers.note("b:1", UnavailableError("b:1: Handshake read failed (Endpoint closing)"))
    assert "; b:1 takes connections but says nothing, so" in answers.text()
    assert "Tried for 7 s" in no_answer(answers, ["a:1", "b:1"], refused, 7.2).message
    answers.clear()
    answers.note("a:1", UnavailableError("a:1: CERTIFICATE_VERIFY_FAILED"))
    assert answers.wrong_peer(["a:1"]) and "certificate" not in answers.text().replace("CERTIFICATE", "")


def test_a_target_says_what_it_is_and_why() -> None:
    here = Target(["a:1", "b:1"], Path("tls"), "prod", explicit=True, why="--coordinator")
    assert str(here) == 'cluster "prod" at a:1, b:1 (from --coordinator)'

"""Datasets of a job: local, by registry and from git; what is fetched, once, and what is told when it cannot be."""

from __future__ import annotations

import fcntl
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from job_files import commit_all, git, make_repository, make_task
from located import places
from rollout.config.load import load_settings, located
from rollout.model.errors import ConfigError, InputError
from rollout.model.problems import faults_of
from rollout.workloads.job.config import JobConfig
from rollout.workloads.job.datasets import Loaded, load_datasets
from rollout.workloads.job.git import checkout, commit_of, resolve_commit
from rollout.workloads.job.registry import RegistryDataset, fetch_registry, find_dataset

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """(url, commit); it has the tag v1, too."""
    url, commit = make_repository(tmp_path_factory.mktemp("repository"), "one", "two")
    git(Path(url), "tag", "-a", "v1", "-m", "first", commit)
    return url, commit


def load(tmp_path: Path, *datasets: dict[str, Any], tasks: tuple[dict[str, Any], ...] = (), **keys: Any) -> Loaded:
    agents = keys.pop("agents", [{"name": "nop"}])
    config = JobConfig.model_validate({"agents": agents, "datasets": datasets, "tasks": tasks, **keys})
    return load_datasets(config, cache=tmp_path / "cache")


def fault(tmp_path: Path, *datasets: dict[str, Any], tasks: tuple[dict[str, Any], ...] = (), **keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, *datasets, tasks=tasks, **keys)
    return str(caught.value).replace(f"{tmp_path}/", "")


def names(loaded: Loaded) -> list[tuple[str, list[str]]]:
    return [(dataset.name, [task.name for task in dataset.tasks]) for dataset in loaded.datasets]


# ---- local


def test_a_directory_of_tasks_in_order_of_name(tmp_path: Path) -> None:
    for name in ("b", "a ü 名", "a"):
        make_task(tmp_path / "hello" / name)
    (tmp_path / "hello" / "notes").mkdir()
    (tmp_path / "hello" / ".hidden").mkdir()
    loaded = load(tmp_path, {"path": str(tmp_path / "hello")})
    assert names(loaded) == [("hello", ["a", "a ü 名", "b"])]
    assert loaded.datasets[0].tasks[0].git_commit_id is None


def test_globs_and_the_first_n(tmp_path: Path) -> None:
    for name in ("fix-1", "fix-2", "fix-3", "make-1"):
        make_task(tmp_path / "d" / name)
    chosen = {"task_names": ["fix-*", "make-*"], "exclude_task_names": ["*-1"], "n_tasks": 1}
    assert names(load(tmp_path, {"path": str(tmp_path / "d"), **chosen})) == [("d", ["fix-2"])]


def test_every_fault_of_every_task_is_told_at_once(tmp_path: Path) -> None:
    make_task(tmp_path / "d" / "one", without=("tests/test.sh",))
    make_task(tmp_path / "d" / "two", "[agent]\ntimeout_sex = 3\n")
    make_task(tmp_path / "d" / "three", without=("task.toml",))
    found = fault(tmp_path, {"path": str(tmp_path / "d")}, {"path": str(tmp_path / "none")})
    assert sorted(places(found)) == [
        "d/one",
        "d/three/task.toml",
        "d/two/task.toml:2: agent.timeout_sex",
        "datasets.1: none",
    ]


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"task_names": ["c*"]}, 'datasets.0: no task of d is called "c*"; it has a'),
        ({"exclude_task_names": ["*"]}, "datasets.0: exclude_task_names leaves no task of d"),
        ({"path": "d/a"}, "d/a is a task; a dataset is a directory of tasks"),
        ({"path": "d/a/tests"}, "holds no tasks: none of its directories has a task.toml"),
    ],
)
def test_a_dataset_that_gives_no_task(tmp_path: Path, section: dict[str, Any], expected: str) -> None:
    make_task(tmp_path / "d" / "a")
    path = tmp_path / section.pop("path", "d")
    assert expected in fault(tmp_path, {"path": str(path), **section})


def test_directories_that_some_systems_could_not_have(tmp_path: Path) -> None:
    for name in ("good", "a:b", "con.x"):
        make_task(tmp_path / "d" / name)
    found = fault(tmp_path, {"path": str(tmp_path / "d")})
    assert places(found) == ["datasets.0: d"] * 2
    assert '"a:b"' in found and '"con.x"' in found


def test_faults_of_datasets_get_their_lines_in_the_job_file(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("agents: [{name: nop}]\ndatasets:\n- path: none\n- path: nor-this\n")
    with pytest.raises(ConfigError) as caught, located(path):
        load_datasets(load_settings(JobConfig, path, environ={}))
    found = places(str(caught.value).replace(f"{tmp_path}/", ""))
    assert found == ["job.yaml:3: datasets.0: none", "job.yaml:4: datasets.1: nor-this"]


def test_two_datasets_of_one_name(tmp_path: Path) -> None:
    for where in ("x/d", "y/D"):
        make_task(tmp_path / where / "a")
    sections = [{"path": str(tmp_path / where)} for where in ("x/d", "y/D")]
    assert 'two are called "D"' in fault(tmp_path, *sections)
    sections[1]["name"] = "other"
    assert names(load(tmp_path, *sections)) == [("d", ["a"]), ("other", ["a"])]


def test_the_dialect_may_be_chosen_for_a_dataset(tmp_path: Path) -> None:
    make_task(tmp_path / "d" / "a")
    (task,) = load(tmp_path, {"path": str(tmp_path / "d"), "dialect": "harbor"}).datasets[0].tasks
    assert (task.schema_version, task.dialect.name, task.environment.memory_mb) == ("1.0", "harbor", None)


def test_what_a_job_needs_of_its_tasks(tmp_path: Path) -> None:
    make_task(tmp_path / "d" / "a", without=("solution/solve.sh", "tests/test.sh"))
    section = {"path": str(tmp_path / "d")}
    agents = [{"name": "nop"}, {"name": "oracle"}]
    found = fault(tmp_path, section, agents=agents)
    assert "tests/test.sh" in found
    assert "solution/solve.sh" in found
    assert names(load(tmp_path, section, verifier={"disable": True})) == [("d", ["a"])]


# ---- git


def test_the_commit_of_a_task_in_a_repository_and_what_differs_from_it(tmp_path: Path) -> None:
    make_task(tmp_path / "repo" / "d" / "a")
    git(tmp_path / "repo", "init", "--quiet")
    commit = commit_all(tmp_path / "repo")
    loaded = load(tmp_path, {"path": str(tmp_path / "repo" / "d")})
    assert loaded.datasets[0].tasks[0].git_commit_id == commit
    assert loaded.notes == ()
    (tmp_path / "repo" / "d" / "a" / "instruction.md").write_text("changed")
    (note,) = load(tmp_path, {"path": str(tmp_path / "repo" / "d")}).notes
    assert f"1 path differs from commit {commit[:12]}" in note


def test_a_directory_in_no_repository_has_no_commit(tmp_path: Path) -> None:
    assert commit_of(tmp_path) is None


def test_variables_of_a_git_that_calls_us_are_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_task(tmp_path / "other" / "a")
    git(tmp_path / "other", "init", "--quiet")
    commit_all(tmp_path / "other")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    assert commit_of(tmp_path) is None


def test_tasks_of_a_repository_at_a_commit_are_fetched_once(tmp_path: Path, repository: tuple[str, str]) -> None:
    commit = repository[1]
    url = str(shutil.copytree(repository[0], tmp_path / "copy.git"))
    section = {"git_url": url, "git_commit_id": commit, "path": "tasks"}
    first = load(tmp_path, section)
    assert names(first) == [("tasks", ["one", "two"])]
    assert {task.git_commit_id for task in first.datasets[0].tasks} == {commit}
    assert not list(first.datasets[0].tasks[0].directory.parent.parent.glob(".git"))
    shutil.rmtree(url)  # whatever is fetched again fails now
    assert load(tmp_path, section) == first


def test_a_branch_or_tag_is_looked_up_and_recorded_as_its_commit(tmp_path: Path, repository: tuple[str, str]) -> None:
    url, commit = repository
    assert resolve_commit(url, "main") == resolve_commit(url, "v1") == resolve_commit(url, None) == commit
    (dataset,) = load(tmp_path, {"git_url": url, "git_commit_id": "v1", "path": "tasks"}).datasets
    assert {task.git_commit_id for task in dataset.tasks} == {commit}


def test_a_branch_that_moves_while_a_job_is_read_is_one_commit(
    tmp_path: Path, repository: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, commit = repository
    answers = iter([commit, "f" * 40])
    monkeypatch.setattr("rollout.workloads.job.git.resolve_commit", lambda url, reference: next(answers))
    tasks = [{"name": name, "git_url": url, "path": f"tasks/{name}"} for name in ("one", "two")]
    (dataset,) = load(tmp_path, {**registry(tmp_path, {"name": "tb", "tasks": tasks}), "name": "tb"}).datasets
    assert {task.git_commit_id for task in dataset.tasks} == {commit}


def test_a_link_in_a_repository_leads_to_no_task_outside(tmp_path: Path) -> None:
    make_task(tmp_path / "secret" / "a")
    (tmp_path / "near").mkdir()
    (tmp_path / "near" / "out").symlink_to(tmp_path / "secret")
    entry = {"name": "tb", "tasks": [{"name": "a", "path": "out/a"}]}
    (tmp_path / "near" / "registry.json").write_text(json.dumps([entry]))
    section = {"registry": {"path": str(tmp_path / "near" / "registry.json")}, "name": "tb"}
    assert 'there is no directory "out/a"' in fault(tmp_path, section)


def test_a_server_that_gives_no_single_commit_gives_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, commit = make_repository(tmp_path / "r", "one")
    make_task(tmp_path / "r" / "work" / "tasks" / "two")
    commit_all(tmp_path / "r" / "work")
    git(tmp_path / "r" / "work", "push", "--quiet", url, "main")
    (tmp_path / "gitconfig").write_text("[protocol]\nversion = 0\n")  # the old one refuses commits without a name
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    found = checkout(f"file://{url}", commit, tmp_path / "cache")
    assert sorted(path.name for path in (found / "tasks").iterdir()) == ["one"]


_FETCHER = """
import sys
from pathlib import Path
from rollout.workloads.job.git import checkout
print("ready", flush=True)
print(checkout(sys.argv[1], sys.argv[2], Path(sys.argv[3])), flush=True)
"""


def test_two_processes_fetch_one_copy(tmp_path: Path, repository: tuple[str, str]) -> None:
    url, commit = repository
    place = checkout(url, commit, tmp_path / "cache").parent
    shutil.rmtree(place / commit)
    command = [sys.executable, "-c", _FETCHER, url, commit, str(tmp_path / "cache")]
    with (place / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until both are at the door
        fetchers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        for fetcher in fetchers:
            assert fetcher.stdout is not None
            assert fetcher.stdout.readline() == "ready\n"
    assert {fetcher.communicate(timeout=60)[0].strip() for fetcher in fetchers} == {str(place / commit)}
    assert [fetcher.returncode for fetcher in fetchers] == [0, 0]
    assert (place / commit / "tasks" / "one" / "task.toml").exists()
    assert sorted(path.name for path in place.iterdir()) == [".lock", commit]


def test_what_a_killed_fetch_left_is_no_copy(tmp_path: Path, repository: tuple[str, str]) -> None:
    url, commit = repository
    whole = checkout(url, commit, tmp_path / "cache")
    whole.rename(whole.parent / ".fetching")
    shutil.rmtree(whole.parent / ".fetching" / "tasks")
    assert (checkout(url, commit, tmp_path / "cache") / "tasks" / "one" / "task.toml").exists()


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"git_commit_id": "0" * 40}, "there is no commit 0000"),
        ({"git_commit_id": "v9"}, 'there is no branch or tag "v9"'),
        ({"git_commit_id": "abcdef1"}, "write all 40 digits of a commit"),
        ({"path": "taks"}, 'there is no directory "taks"'),
        ({"path": "../work"}, 'the path "../work" leads out of it'),
        ({"git_url": "/nowhere/at/all.git"}, "git ls-remote failed: fatal: '/nowhere/at/all.git' does not appear"),
    ],
)
def test_a_repository_that_cannot_give_the_tasks(
    tmp_path: Path, repository: tuple[str, str], section: dict[str, Any], expected: str
) -> None:
    assert expected in fault(tmp_path, {"git_url": repository[0], "path": "tasks", **section})
    assert not list((tmp_path / "cache").glob("*/*[0-9a-f]/.git"))


@pytest.mark.parametrize("url", ["--upload-pack=touch x", "ext::sh -c id", "", "a\nb"])
def test_an_address_that_would_run_something_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is no address of a repository"):
        checkout(url, "0" * 40, Path("cache"))


def test_a_password_in_an_address_is_in_no_message(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}/x.git"
        found = fault(tmp_path, {"git_url": f"http://me:secret@{address}"})
    assert "git ls-remote failed" in found
    assert "secret" not in found


def test_a_relative_path_is_a_repository_too(
    tmp_path: Path, repository: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(repository[0]).parent)
    assert names(load(tmp_path, {"git_url": Path(repository[0]).name, "path": "tasks"})) == [("tasks", ["one", "two"])]


def test_git_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="git is not installed"):
        resolve_commit("https://example.org/x.git", None)


def test_unknown_keys_of_others_tasks_are_told_and_those_of_ours_refused(tmp_path: Path) -> None:
    url, _ = make_repository(tmp_path / "r", "one")
    work = tmp_path / "r" / "work"
    make_task(work / "tasks" / "one", "[agent]\nretries = 3\n")
    commit_all(work)
    git(work, "push", "--quiet", url, "main")
    (note,) = load(tmp_path, {"git_url": url, "path": "tasks"}).notes
    assert "task.toml:2: agent.retries: unknown key" in note
    assert "agent.retries: unknown key" in fault(tmp_path, {"path": str(work / "tasks")})


# ---- registry.json


def registry(tmp_path: Path, *datasets: dict[str, Any]) -> dict[str, Any]:
    (tmp_path / "registry.json").write_text(json.dumps(datasets))
    return {"registry": {"path": str(tmp_path / "registry.json")}}


def test_a_dataset_of_a_registry(tmp_path: Path, repository: tuple[str, str]) -> None:
    url, commit = repository
    make_task(tmp_path / "near")
    tasks = [
        {"name": "first", "git_url": url, "git_commit_id": commit, "path": "tasks/two"},
        {"name": "second", "git_url": url, "path": "tasks/one"},
        {"name": "third", "path": "near"},
    ]
    known = registry(tmp_path, {"name": "tb", "version": "2.0", "description": "", "tasks": tasks, "metrics": []})
    loaded = load(tmp_path, {**known, "name": "tb", "version": "2.0"})
    assert names(loaded) == [("tb", ["first", "second", "third"])]
    assert [task.git_commit_id for task in loaded.datasets[0].tasks] == [commit, commit, None]
    assert loaded.datasets[0].version == "2.0"


@pytest.mark.parametrize(
    ("entry", "section", "expected"),
    [
        ({"name": "hello"}, {"name": "helo"}, 'there is no dataset "helo"; did you mean "hello"?'),
        ({"name": "tb", "version": "1"}, {"name": "tb", "version": "2"}, 'no version "2" of tb; it has "1"'),
        ({"name": "tb", "version": 1}, {"name": "tb"}, 'dataset "tb": version: must be a string, not 1'),
        ({"name": "tb", "tasks": [{"path": "x"}]}, {"name": "tb"}, 'dataset "tb": task 1: name: is missing'),
        ({"name": "tb", "tasks": []}, {"name": "tb"}, 'the dataset "tb" has no tasks'),
        ({"name": "tb", "tasks": [{"name": "a/b", "path": "x"}]}, {"name": "tb"}, '"a/b" cannot be a directory'),
        ({"name": "tb", "tasks": [{"name": "a", "path": "/etc"}]}, {"name": "tb"}, 'the path "/etc" leads out of it'),
        (
            {"name": "tb", "tasks": [{"name": "near", "path": "near"}, {"name": "NEAR", "path": "near"}]},
            {"name": "tb"},
            'two tasks are called "NEAR"',
        ),
    ],
)
def test_a_registry_that_does_not_help(
    tmp_path: Path, entry: dict[str, Any], section: dict[str, Any], expected: str
) -> None:
    make_task(tmp_path / "near")
    assert expected in fault(tmp_path, {**registry(tmp_path, entry), **section})


def test_a_registry_that_is_no_json_or_not_there(tmp_path: Path) -> None:
    section = {**registry(tmp_path), "name": "tb"}
    (tmp_path / "registry.json").write_text("[{")
    assert "registry.json: not valid JSON" in fault(tmp_path, section)
    (tmp_path / "registry.json").unlink()
    assert "registry.json: " in (found := fault(tmp_path, section)) and "No such file" in found


class _Answers(BaseHTTPRequestHandler):
    """Gives the answers of its server, (status, body) each, one after another."""

    def do_GET(self) -> None:
        status, body = self.server.answers.pop(0)  # pyright: ignore[reportAttributeAccessIssue]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """The address of a server with these answers."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    servers = list[HTTPServer]()

    def serve(*answers: tuple[int, bytes]) -> str:
        server = HTTPServer(("127.0.0.1", 0), _Answers)
        server.answers = list(answers)  # pyright: ignore[reportAttributeAccessIssue]
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}/registry.json"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_registry_on_the_web_is_asked_again_when_it_stumbles(
    tmp_path: Path, web: Callable[..., str], repository: tuple[str, str]
) -> None:
    entry = {"name": "tb", "tasks": [{"name": "a", "git_url": repository[0], "path": "tasks/one"}]}
    url = web((503, b""), (200, json.dumps([entry]).encode()))
    assert names(load(tmp_path, {"registry": {"url": url}, "name": "tb"})) == [("tb", ["a"])]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((404, b""), "the server answered 404 Not Found"),
        ((200, b"<html>"), "registry.json: not valid JSON"),
        ((200, b'[{"name": "tb", "tasks": [{"name": "a"}]}]'), "no git_url, and the registry is not on this machine"),
    ],
)
def test_a_registry_on_the_web_that_does_not_help(
    tmp_path: Path, web: Callable[..., str], answer: tuple[int, bytes], expected: str
) -> None:
    assert expected in fault(tmp_path, {"registry": {"url": web(answer)}, "name": "tb"})


def test_a_registry_is_fetched_from_the_web_alone() -> None:
    with pytest.raises(InputError, match="http:// or https://"):
        fetch_registry("file:///etc/passwd")


def test_a_registry_where_nobody_listens(web: Callable[..., str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(InputError, match=r"cannot be fetched: .*refused"):
            fetch_registry(f"http://127.0.0.1:{unused.getsockname()[1]}/r.json")


def test_without_a_version_the_highest_is_taken() -> None:
    versions = ["1.9", "1.10", "1.10rc1", "0.3"]
    known = [RegistryDataset(name="tb", version=version) for version in versions]
    assert find_dataset(known, "tb", None, "r").version == "1.10"
    assert find_dataset([*known, RegistryDataset(name="tb", version="head")], "tb", None, "r").version == "head"


def test_single_tasks_are_a_dataset_of_their_own(tmp_path: Path, repository: tuple[str, str]) -> None:
    url, commit = repository
    near = make_task(tmp_path / "near")
    loaded = load(tmp_path, tasks=({"path": str(near)}, {"path": "tasks/one", "git_url": url}))
    assert names(loaded) == [("adhoc", ["near", "one"])]
    assert loaded.datasets[0].tasks[1].git_commit_id == commit


# ---- those that come with the package


def test_bundled_datasets_are_whole_and_in_the_docs(tmp_path: Path) -> None:
    """With the reward of an agent that does nothing where it is not 0. Their keys are checked as a user's are."""
    oracle = [{"name": "oracle"}]
    loaded = load(tmp_path, {"path": "bundled:rollout"}, {"path": "bundled:harbor"}, agents=oracle)
    dialects = [(dataset.name, {task.dialect.name for task in dataset.tasks}) for dataset in loaded.datasets]
    assert dialects == [("rollout", {"rollout"}), ("harbor", {"harbor"})]
    tasks = [task for dataset in loaded.datasets for task in dataset.tasks]
    assert {task.git_commit_id for task in tasks} == {None}
    names = {
        f"`{task.name}`" + (f" ({task.metadata['nop_reward']})" if "nop_reward" in task.metadata else "")
        for task in tasks
    }
    text = (Path(__file__).parents[2] / "docs" / "job.md").read_text()
    assert [name for name in names if f" {name}" not in text] == []


def test_a_bundled_dataset_that_there_is_not(tmp_path: Path) -> None:
    expected = 'datasets.0: there is no bundled dataset "terminal"; there are bundled:harbor and bundled:rollout'
    assert expected in fault(tmp_path, {"path": "bundled:terminal"})


def test_no_file_of_a_bundled_task_is_left_out_of_the_repository() -> None:
    """A directory called build/ or data/ would be: .gitignore, which also decides what is in the package."""
    top = Path(__file__).parents[2]
    ignored = git(
        top, "ls-files", "--others", "--ignored", "--exclude-standard", "common/rollout/workloads/job/bundled"
    )
    assert ignored == ""


# ---- formats


@pytest.mark.parametrize(
    ("toml", "dialect"),
    [
        ('[metadata]\nauthor_name = "me"\n', "harbor"),
        ("[agent]\ninstall_timeout_sec = 9\n", "rollout"),
        ('dialect = "harbor"\n[agent]\ninstall_timeout_sec = 9\n', "harbor"),
    ],
)
def test_the_keys_of_a_task_of_version_1_0_settle_its_format(tmp_path: Path, toml: str, dialect: str) -> None:
    make_task(tmp_path / "d" / "a", f'version = "1.0"\n{toml}')
    (task,) = load(tmp_path, {"path": str(tmp_path / "d")}).datasets[0].tasks
    assert task.dialect_name == dialect


def test_tasks_that_both_formats_could_be_are_refused_once_a_dataset_until_one_is_named(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_task(tmp_path / "d" / name, 'version = "1.0"\n[environment]\nmemory = "1G"\n')
    section = {"path": str(tmp_path / "d")}
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, section)
    (told,) = faults_of(refused.value.message)
    assert told.startswith("datasets.0: 2 tasks, a among them") and "dialect: harbor or dialect: rollout" in told
    for dialect in ("rollout", "harbor"):
        (task, other) = load(tmp_path, {**section, "dialect": dialect}).datasets[0].tasks
        assert task.dialect_name == other.dialect_name == dialect

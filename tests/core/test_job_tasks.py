"""Task directories of both formats: what they mean, and everything that can be wrong with them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from job_files import make_task
from located import places
from rollout.model.errors import ConfigError
from rollout.workloads.job.dialect import HARBOR, ROLLOUT, version_of
from rollout.workloads.job.load_task import LoadedTask, TaskUse, load_task
from rollout.workloads.job.quantities import mebibytes, processors
from rollout.workloads.job.task import Task
from rollout.workloads.job.templates import fill_in


def load(tmp_path: Path, toml: str, *, without: tuple[str, ...] = (), use: TaskUse | None = None) -> Task:
    return load_task(make_task(tmp_path / "t", toml, without=without), use or TaskUse()).task


def fault(directory: Path, **use: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_task(directory, TaskUse(**use))
    return str(caught.value).replace(f"{directory}/", "").replace(str(directory), "TASK")


def toml_fault(tmp_path: Path, toml: str, **use: Any) -> str:
    return fault(make_task(tmp_path / "t", toml), **use)


# ---- the two formats


def test_defaults_of_the_older_format(tmp_path: Path) -> None:
    task = load(tmp_path, 'version = "1.0"\n')
    (step,) = task.steps
    assert (task.name, task.dialect, task.schema_version) == ("t", ROLLOUT, "1.0")
    assert (task.environment.cpus, task.environment.memory_mb, task.environment.storage_mb) == (1.0, 2048, 10240)
    assert (step.agent.timeout_s, step.agent.install_timeout_s, step.verifier.timeout_s) == (600, 300, 600)
    assert (task.environment.build_timeout_s, task.environment.docker_image) == (600, None)
    assert (step.instruction, step.tests, step.solution) == ("instruction.md", ("tests",), "solution")


def test_defaults_of_harbors_format(tmp_path: Path) -> None:
    task = load(tmp_path, "")
    (step,) = task.steps
    assert (task.dialect, task.schema_version) == (HARBOR, "1.4")
    assert (task.environment.cpus, task.environment.memory_mb, task.environment.storage_mb) == (None, None, None)
    assert (step.agent.timeout_s, step.verifier.timeout_s, step.verifier.mode) == (None, 600, "shared")
    assert task.environment.network.mode == "public"


def test_every_key_of_the_older_format(tmp_path: Path) -> None:
    toml = """version = "1.0"
source = "https://example.org"
[metadata]
difficulty = "easy"
created = 2026-01-02
[verifier]
timeout_sec = 30.0
[agent]
install_timeout_sec = 10.0
timeout_sec = 20
[environment]
build_timeout_sec = 40.0
docker_image = "debian:12"
cpus = "2"
memory = "4G"
storage = "512M"
"""
    task = load(tmp_path, toml, without=("environment/Dockerfile",))
    (step,) = task.steps
    assert task.metadata == {"difficulty": "easy", "created": "2026-01-02"}
    assert task.source == "https://example.org"
    assert (step.verifier.timeout_s, step.agent.install_timeout_s, step.agent.timeout_s) == (30, 10, 20)
    assert (task.environment.build_timeout_s, task.environment.docker_image, task.environment.build) == (
        40,
        "debian:12",
        None,
    )
    assert (task.environment.cpus, task.environment.memory_mb, task.environment.storage_mb) == (2.0, 4096, 512)


def test_every_key_of_harbors_format(tmp_path: Path) -> None:
    toml = """schema_version = "1.4"
source = "x"
multi_step_reward_strategy = "final"
artifacts = ["/app/out", { source = "/var/log/x", destination = "x", exclude = ["*.tmp"], service = "db" }]
[task]
name = "org/name"
version = "1"
description = "d"
authors = [{ name = "A", email = "a@example.org" }]
keywords = ["k"]
[metadata]
anything = { nested = [1, 2] }
[solution]
env = { KEY = "${KEY:-none}" }
[agent]
timeout_sec = 5
user = 1000
network_mode = "allowlist"
allowed_hosts = ["PyPI.org.", "*.example.org", "192.0.2.0/24", "2001:db8::1"]
[verifier]
timeout_sec = 7
env = { A = "b" }
user = "root"
network_mode = "no-network"
environment_mode = "separate"
[[verifier.collect]]
command = "pg_dump"
service = "db"
[verifier.environment]
docker_image = "verify:1"
memory_mb = 100
[environment]
build_timeout_sec = 9
os = "Linux"
cpus = 0.5
memory_mb = 300
storage_mb = 400
gpus = 1
gpu_types = ["H100"]
tpu = { type = "v6e", topology = "2x2" }
network_mode = "no-network"
env = { X = "${HOME}" }
mcp_servers = [{ name = "m", transport = "http", url = "http://m" }]
skills_dir = "/skills"
workdir = "/app"
healthcheck = { command = "true", interval_sec = 1, timeout_sec = 2, start_period_sec = 3, start_interval_sec = 4, retries = 5 }
"""
    task = load(tmp_path, toml)
    (step,) = task.steps
    assert (task.package, task.reward_strategy, task.solution_env) == ("org/name", "final", {"KEY": "${KEY:-none}"})
    assert [artifact.source for artifact in step.artifacts] == ["/app/out", "/var/log/x"]
    assert (step.agent.user, step.agent.network.mode) == ("1000", "allowlist")
    assert step.agent.network.allowed_hosts == ("pypi.org", "*.example.org", "192.0.2.0/24", "2001:db8::1")
    assert (step.verifier.mode, step.verifier.network.mode, step.verifier.collect[0].timeout_sec) == (
        "separate",
        "no-network",
        60,
    )
    assert step.verifier.environment is not None
    assert (step.verifier.environment.docker_image, step.verifier.environment.memory_mb) == ("verify:1", 100)
    environment = task.environment
    assert (environment.cpus, environment.memory_mb, environment.storage_mb, environment.gpus) == (0.5, 300, 400, 1)
    assert environment.mcp_servers[0].transport == "streamable-http"
    assert environment.healthcheck is not None
    assert environment.healthcheck.retries == 5
    assert Task.model_validate_json(task.model_dump_json()) == task


@pytest.mark.parametrize(
    ("version", "schema_version", "found"),
    [
        (None, None, ("1.4", HARBOR)),
        ("1.0", None, ("1.0", ROLLOUT)),
        ("0.9", None, ("0.9", ROLLOUT)),
        ("1.1", None, ("1.1", HARBOR)),
        (None, "1.0", ("1.0", HARBOR)),
        ("1.2", "1.2", ("1.2", HARBOR)),
    ],
)
def test_the_version_decides_the_format(version: str | None, schema_version: str | None, found: object) -> None:
    assert version_of(version, schema_version) == found


# ---- old names


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ('memory = "2G"\nstorage = "1T"', (2048, 1 << 20, "public")),
        ('memory = "2G"\nmemory_mb = 2048', (2048, None, "public")),
        ("allow_internet = false", (None, None, "no-network")),
        ("allow_internet = true", (None, None, "public")),
        ('allow_internet = false\nnetwork_mode = "no-network"', (None, None, "no-network")),
    ],
)
def test_old_names_mean_the_new_ones(tmp_path: Path, environment: str, expected: object) -> None:
    found = load(tmp_path, f"[environment]\n{environment}\n").environment
    assert (found.memory_mb, found.storage_mb, found.network.mode) == expected


def test_old_and_new_names_that_disagree_are_refused(tmp_path: Path) -> None:
    toml = """version = "1.0"
schema_version = "1.4"
[environment]
memory = "2G"
memory_mb = 1
allow_internet = false
network_mode = "public"
"""
    message = toml_fault(tmp_path, toml)
    assert places(message) == ["task.toml:3: environment", "task.toml:1"]
    assert all(kept in message for kept in ("keep memory_mb", "keep network_mode", "keep schema_version"))


# ---- wrong values, each key once


@pytest.mark.parametrize(
    ("toml", "expected"),
    [
        ("version = 1.0", "task.toml:1: version: must be a string, not 1.0"),
        ('version = "one"', 'task.toml:1: version: must be a version such as "1.0", not "one"'),
        ('schema_version = "1.5"', 'task.toml:1: schema_version: "1.5" is newer than 1.4'),
        ("metadata = 3", "task.toml:1: metadata: must be a table, not 3"),
        ("source = []", "task.toml:1: source: must be a string"),
        ("multi_step_reward_strategy = 'median'", 'must be "mean" or "final", not "median"; did you mean "mean"?'),
        ("artifacts = ['../x']", 'task.toml:1: artifacts.0: "../x" must not hold ".."'),
        ("artifacts = [{source = '/a', destination = '/b'}]", "artifacts.0.destination: "),
        ("artifacts = [{source = '/a', destination = 'manifest.json'}]", "is where the list of artifacts is kept"),
        ("artifacts = [{source = 'a', service = 'db'}]", "must be an absolute path, since it is of another service"),
        ("task.name = 'noorg'", "task.toml:1: task.name: must match"),
        ("task = {name = 'a/b', authors = [{}]}", "task.toml:1: task.authors.0.name: is missing"),
        ("agent.timeout_sec = 0", "task.toml:1: agent.timeout_sec: must be more than 0, not 0"),
        ("agent.timeout_sec = nan", "agent.timeout_sec: "),
        ("agent.install_timeout_sec = 'x'", "task.toml:1: agent.install_timeout_sec: must be a number"),
        ("agent.user = true", "task.toml:1: agent.user: must be a string, not true"),
        ("agent.network_mode = 'none'", 'agent.network_mode: must be "no-network", "public" or "allowlist"'),
        ("agent.allowed_hosts = ['a.b']", 'agent: allowed_hosts means nothing without network_mode = "allowlist"'),
        ("agent = {network_mode='allowlist', allowed_hosts=['http://a']}", "must be a host, an IP address or a CIDR"),
        ("agent = {network_mode='allowlist', allowed_hosts=['a.*.b']}", "must be a host such as pypi.org"),
        ("agent = {network_mode='allowlist', allowed_hosts=['*.1.2.3.4']}", "a wildcard stands before a name"),
        ("agent = {network_mode='allowlist', allowed_hosts=['192.0.2.1/24']}", "a CIDR range: no URL"),
        ("verifier.timeout_sec = -1", "task.toml:1: verifier.timeout_sec: must be more than 0"),
        ("verifier.env = {'1A' = 'x'}", 'task.toml:1: verifier.env: "1A" is no name of a variable'),
        ("verifier.env = {A = '${B'}", 'verifier.env: A: "${B" must be like ${VAR} or ${VAR:-default}'),
        ('verifier.env = {A = "a\\u0000"}', "verifier.env: A: the value holds a zero byte"),
        ("verifier.env = {A = 1}", "task.toml:1: verifier.env.A: must be a string, not 1"),
        ("verifier.environment_mode = 'own'", 'must be "shared" or "separate"'),
        ("verifier = {environment_mode = 'shared', environment = {}}", "disagree: leave one of them out"),
        ("verifier.collect = [{}]", "task.toml:1: verifier.collect.0.command: is missing"),
        ("verifier.collect = [{command = 'x', service = '-'}]", "verifier.collect.0.service: must match"),
        ("environment.build_timeout_sec = 0", "environment.build_timeout_sec: must be more than 0"),
        ("environment.docker_image = ''", "environment.docker_image: must not be empty"),
        ("environment.os = 'mac'", 'environment.os: must be "linux" or "windows"'),
        ("environment.os = 'windows'", "task.toml: environment.os: there is no provider of windows sandboxes"),
        ("environment.cpus = 'two'", 'environment.cpus: must be like "1", "0.5" or "500m", not "two"'),
        ("environment.cpus = nan", "environment.cpus: must be a number, not nan"),
        ("environment.cpus = 0", "environment.cpus: must be more than 0"),
        ("environment.memory = '2X'", 'environment.memory: must be like "2G"'),
        ("environment.memory = 2048", 'environment.memory: must say its unit, such as "2G"'),
        ("environment.memory = '1K'", "environment.memory: must be at least 1 MiB"),
        ("environment.memory_mb = 0", "environment.memory_mb: must be at least 1"),
        ("environment.storage_mb = '1G'", "environment.storage_mb: must be an integer"),
        ("environment.gpus = -1", "environment.gpus: must be at least 0"),
        ("environment.gpu_types = 'H100'", "environment.gpu_types: must be a list"),
        ("environment.tpu = {type = 'v6e', topology = '2'}", "environment.tpu.topology: must match"),
        ("environment.allow_internet = 'no'", "environment.allow_internet: must be true or false"),
        ("environment.mcp_servers = [{name = 'x'}]", 'transport "sse" needs a url'),
        ("environment.mcp_servers = [{name = 'x', transport = 'stdio'}]", 'transport "stdio" needs a command'),
        ("environment.workdir = 'app'", "environment.workdir: must match ^/"),
        ("environment.healthcheck = {retries = 1}", "environment.healthcheck.command: is missing"),
        ("environment.healthcheck = {command = 'x', retries = 0}", "healthcheck.retries: must be at least 1"),
        ("[[steps]]\nname = 'a/b'", 'task.toml:2: steps.0.name: "a/b" cannot be a directory on every system'),
        ("[[steps]]\nname = 'aux.txt'", "cannot be a directory on every system"),
        ("[[steps]]\nname = 'a'\n[[steps]]\nname = 'A'", 'task.toml:4: steps.1.name: "a" and "A" are one name'),
        ("[[steps]]\nname = 'a'\nmin_reward = 'x'", "task.toml:3: steps.0.min_reward: must be a number, or a table"),
        ("[[steps]]\nname = 'a'\nmin_reward = {x = 'y'}", "task.toml:3: steps.0.min_reward.x: must be a number"),
        ("[[steps]]\nmin_reward = 1", "task.toml:1: steps.0.name: is missing"),
        ("[agnt]\nx = 1", 'task.toml:1: agnt: unknown key; did you mean "agent"?'),
        ("[[steps]]\nname = 'a'\n[steps.agent]\ntimeout = 1", 'steps.0.agent.timeout: unknown key; did you mean "ti'),
        ("[agent\n", "task.toml:1:7: not valid TOML"),
    ],
)
def test_a_wrong_key_is_told_with_its_line(tmp_path: Path, toml: str, expected: str) -> None:
    assert expected in toml_fault(tmp_path, toml + "\n")


def test_unknown_keys_of_files_that_are_not_ours_are_told_and_not_used(tmp_path: Path) -> None:
    directory = make_task(
        tmp_path / "t", "later = 1\nartifacts = [{source = '/a', to = 'b'}]\n[agent]\ntimeout_sec = 5\nmood = 'good'\n"
    )
    loaded: LoadedTask = load_task(directory, TaskUse(strict=False))
    assert loaded.task.steps[0].agent.timeout_s == 5
    assert [note.replace(f"{directory}/", "").partition("; ")[0] for note in loaded.notes] == [
        "task.toml:1: later: unknown key",
        "task.toml:2: artifacts.0.to: unknown key",
        "task.toml:5: agent.mood: unknown key",
    ]


def test_a_wrong_value_stays_a_fault_in_a_file_that_is_not_ours(tmp_path: Path) -> None:
    found = toml_fault(tmp_path, "later = 1\nagent.timeout_sec = -5\n", strict=False)
    assert "later" in found
    assert "task.toml:2: agent.timeout_sec: " in found


# ---- variables


def test_variables_that_are_missing_are_told_where_they_are_used(tmp_path: Path) -> None:
    toml = """[environment.env]
A = "${HERE} and ${NOT_HERE}"
B = "${NOT_HERE:-default}"
[solution.env]
C = "${OF_THE_SOLUTION}"
[verifier]
env = { D = "${ALSO_NOT}" }
"""
    message = toml_fault(tmp_path, toml, environ={"HERE": "x"})
    assert places(message) == ["task.toml:2: environment.env", "task.toml:7: verifier.env"]
    assert "A needs NOT_HERE" in message and "D needs ALSO_NOT" in message
    assert "C needs OF_THE_SOLUTION" in toml_fault(tmp_path, toml, environ={}, oracle=True)
    assert "D needs" not in toml_fault(tmp_path, toml, environ={}, verify=False)


def test_templates_are_filled_in() -> None:
    env = {"A": "x-${V}-${V}", "B": "${W:-d}", "C": "${E:-d}", "D": "$V {} $$", "F": "${W:-}"}
    assert fill_in(env, {"V": "v", "E": ""}) == {"A": "x-v-v", "B": "d", "C": "d", "D": "$V {} $$", "F": ""}
    with pytest.raises(ValueError, match="A needs V and W"):
        fill_in({"A": "${V}${W}"}, {})


def test_what_a_variable_holds_is_never_filled_in_again() -> None:
    assert fill_in({"A": "${V}"}, {"V": "${W}", "W": "secret"}) == {"A": "${W}"}


# ---- quantities


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        ("2G", 2048),
        ("2g", 2048),
        ("512M", 512),
        ("512Mi", 512),
        ("2GiB", 2048),
        ("1.5GB", 1536),
        ("2048K", 2),
        ("1T", 1 << 20),
        ("4194304", 4),
        ("1048576B", 1),
    ],
)
def test_sizes(text: str, mib: int) -> None:
    assert mebibytes(text) == mib


@pytest.mark.parametrize("text", ["", "G", "-1G", "1 P", "1e3M", "0G", "nan", "1Gb/s", "999999999T", "100"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        mebibytes(text)


@pytest.mark.parametrize(("text", "amount"), [("1", 1.0), ("0.5", 0.5), ("500m", 0.5)])
def test_processors(text: str, amount: float) -> None:
    assert processors(text) == amount


# ---- steps and verifiers


STEPS = """[agent]
timeout_sec = 100
[verifier]
timeout_sec = 50
env = { A = "task" }
[[steps]]
name = "first"
min_reward = 0.5
artifacts = ["/b"]
[steps.verifier]
env = { B = "step" }
[[steps]]
name = "zweiter Schritt ü"
[steps.agent]
timeout_sec = 7
[steps.verifier]
environment_mode = "separate"
"""


def make_steps(directory: Path) -> Path:
    make_task(directory, 'artifacts = ["/a"]\n' + STEPS, without=("instruction.md",))
    for name in ("first", "zweiter Schritt ü"):
        (directory / "steps" / name).mkdir(parents=True)
        (directory / "steps" / name / "instruction.md").write_text("do\n")
    (directory / "steps" / "first" / "tests").mkdir()
    return directory


def test_steps_have_what_the_task_has_unless_they_say_otherwise(tmp_path: Path) -> None:
    task = load_task(make_steps(tmp_path / "t")).task
    first, second = task.steps
    assert task.has_steps
    assert (first.agent.timeout_s, second.agent.timeout_s) == (100, 7)
    assert (first.verifier.timeout_s, first.verifier.env) == (50, {"A": "task", "B": "step"})
    assert first.min_reward == {"reward": 0.5}
    assert [artifact.source for artifact in first.artifacts] == ["/a", "/b"]
    assert first.tests == ("tests", "steps/first/tests")
    assert (second.tests, second.instruction) == (("tests",), "steps/zweiter Schritt ü/instruction.md")
    assert (first.verifier.mode, second.verifier.mode) == ("shared", "separate")
    assert second.verifier.environment == task.environment


def test_each_step_needs_its_instruction(tmp_path: Path) -> None:
    directory = make_steps(tmp_path / "t")
    (directory / "steps" / "first" / "instruction.md").write_text(" \n")
    (directory / "steps" / "zweiter Schritt ü" / "instruction.md").unlink()
    found = fault(directory)
    assert "steps/first/instruction.md: empty" in found
    assert "steps/zweiter Schritt ü/instruction.md: " in found


def test_a_verifier_of_its_own_is_built_beside_the_tests(tmp_path: Path) -> None:
    directory = make_task(
        tmp_path / "t",
        "verifier.environment_mode = 'separate'\nenvironment.docker_image = 'a:1'\n",
        tests__Dockerfile="FROM x",
    )
    environment = load_task(directory).task.steps[0].verifier.environment
    assert environment is not None
    assert (environment.docker_image, environment.build) == (None, "tests")


# ---- files


def test_everything_that_is_missing_is_told(tmp_path: Path) -> None:
    directory = tmp_path / "t"
    directory.mkdir()
    message = fault(directory, oracle=True)
    assert places(message) == ["task.toml", "TASK", "instruction.md", "TASK", "TASK"]
    assert re.findall(r"TASK: .*?(\w+/[\w.]+)", message) == [
        "environment/Dockerfile", "tests/test.sh", "solution/solve.sh"
    ]  # fmt: skip


def test_files_are_looked_at_although_keys_are_wrong(tmp_path: Path) -> None:
    directory = make_task(tmp_path / "t", "agent.timeout_sec = 0\n", without=("tests/test.sh",))
    found = fault(directory)
    assert "agent.timeout_sec" in found
    assert "tests/test.sh" in found


def test_a_solution_in_a_directory_called_oracle(tmp_path: Path) -> None:
    directory = make_task(tmp_path / "t", without=("solution/solve.sh",), oracle__solve__sh="")
    (directory / "oracle" / "solve").rename(directory / "oracle" / "x")
    (directory / "oracle" / "solve.sh").write_text("true\n")
    assert load_task(directory, TaskUse(oracle=True)).task.steps[0].solution == "oracle"


def test_two_solutions_are_one_too_many(tmp_path: Path) -> None:
    assert "both solution/ and oracle/" in fault(make_task(tmp_path / "t", oracle__x=""))


def test_a_task_that_is_not_verified_needs_no_tests(tmp_path: Path) -> None:
    directory = make_task(tmp_path / "t", without=("tests/test.sh",))
    assert load_task(directory, TaskUse(verify=False)).task.name == "t"


def test_an_instruction_that_is_no_text(tmp_path: Path) -> None:
    directory = make_task(tmp_path / "t")
    (directory / "instruction.md").write_bytes(b"\xff\xfe")
    assert "instruction.md: not UTF-8 text" in fault(directory)


def test_links_and_files_that_cannot_travel(tmp_path: Path) -> None:
    directory = make_task(tmp_path / "t")
    (directory / "tests" / "loop").symlink_to("..")
    (directory / "out").symlink_to("/etc/hostname")
    (directory / "dead").symlink_to("nowhere")
    (directory / "a").symlink_to("b")
    (directory / "b").symlink_to("a")
    os.mkfifo(directory / "fifo")
    assert sorted(places(fault(directory))) == ["a", "b", "dead", "fifo", "out", "tests/loop"]


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    directory = make_task(tmp_path / "t")
    try:
        (directory / os.fsdecode(b"\xff.txt")).write_text("x")
    except OSError:
        pytest.skip("this file system takes no such name")
    assert "the name is not UTF-8" in fault(directory)


def test_a_file_that_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    assert fault(tmp_path / "f").startswith("TASK: this is a file")


# ---- the checksum


def checksum(directory: Path) -> str:
    return load_task(directory).task.checksum


def test_the_checksum_is_of_names_contents_and_executable_bits(tmp_path: Path) -> None:
    one, two = make_task(tmp_path / "one"), make_task(tmp_path / "two")
    os.utime(two / "instruction.md", (0, 0))
    (two / ".git").mkdir()
    (two / ".git" / "HEAD").write_text("x")
    assert checksum(one) == checksum(two)
    (two / "tests" / "test.sh").chmod(0o755)
    executable = checksum(two)
    (two / "tests" / "test.sh").chmod(0o644)
    (two / "instruction.md").write_text("Write hallo.\n")
    changed = checksum(two)
    (two / "instruction.md").write_bytes((one / "instruction.md").read_bytes())
    (two / "tests" / "more").write_text("")
    assert len({checksum(one), executable, changed, checksum(two)}) == 4


def test_a_link_inside_the_task_counts_as_what_it_leads_to(tmp_path: Path) -> None:
    one = make_task(tmp_path / "one", tests__data="x")
    two = make_task(tmp_path / "two", shared="x")
    (two / "tests" / "data").symlink_to("../shared")
    (one / "shared").write_text("x")
    assert checksum(one) == checksum(two)


# ---- side services


def test_a_service_beside_main_is_a_fault_and_main_alone_is_told(tmp_path: Path) -> None:
    alone = "services:\n  main:\n    build: .\n"
    task = make_task(tmp_path / "t", files={"environment/docker-compose.yaml": alone})
    (note,) = load_task(task).notes
    assert "docker-compose.yaml: not used" in note
    (task / "environment/docker-compose.yaml").write_text(f"{alone}  db:\n    image: postgres\n")
    assert places(fault(task)) == ["environment/docker-compose.yaml:4: services.db"]


def test_a_compose_file_takes_the_place_of_no_dockerfile(tmp_path: Path) -> None:
    compose = {"environment/docker-compose.yaml": "services: {main: {image: debian}}\n"}
    task = make_task(tmp_path / "t", without=("environment/Dockerfile",), files=compose)
    assert "there is no environment/Dockerfile" in fault(task)

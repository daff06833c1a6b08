"""Warns of common mistakes in tasks that can be loaded, as far as their files alone prove them."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from rollout.objects.digest import hash_file
from rollout.processes.command import run
from rollout.workloads.job.copied_files import copied, missing_source
from rollout.workloads.job.dockerfile import DockerfileError
from rollout.workloads.job.rewards import REWARD_JSON, REWARD_TEXT
from rollout.workloads.job.task import ENVIRONMENT, Step, Task
from rollout.workloads.job.task_directory import CONFIG, SOLUTIONS
from rollout.workloads.job.templates import lacks, missing

_TEXT_MAX = 1 << 20
_BASH_S = 10.0
_SHELL = re.compile(rb"#!\s*/\S*?(?:env\s+(?:-S\s+)?)?(?:ba|da)?sh\b")
_OF_BASH = re.compile(r".*?line (\d+): (.*)", re.DOTALL)
_ERREXIT = re.compile(r"^\s*set\s+(?:-[a-z]*e[a-z]*|-o\s+errexit)\b")
_STATUS_TEST = re.compile(r"^\s*if\s+(?:\[\[?|test)\s+\"?\$\?")
_EXIT_STATUS = re.compile(r"^\s*exit\s+\"?\$")
_SERVICE = re.compile(
    r"(?<![&>|\\])&[\s)]*$|\b(?:nohup|setsid|daemonize|supervisord)\s"
    r"|\bservice\s+\S+\s+(?:re)?start\b|\bsystemctl\s+(?:re)?start\b|^\s*nginx\b(?!.*\s-[tsvV])"
)
_COMMENT = re.compile(r"(?:^|\s)#.*$")
_ENDS_THEM = re.compile(r"^\s*(?:wait|kill|pkill|killall)\b", re.MULTILINE)
_SECRET = re.compile(r"test\.sh|solve\.sh|test_.*\.py|.*_test\.py")
"""Names of files that show the agent how it is verified, or what to do."""


def review(task: Task, environ: Mapping[str, str]) -> list[str]:
    """Return warnings, most as `file:line: what, and what would be right`. `environ` provides variables."""
    found = [*_image(task), *_solutions(task), *_variables(task, environ)]
    for step in task.steps:
        found += _verifier(task, step)
    found += _services(task)
    found += _scripts(task)
    found += _leaks(task)
    return list(dict.fromkeys(found))


def _read(path: Path) -> str | None:
    """Read a file. Returns None if it is missing, not text, or too large to be written by hand."""
    try:
        return path.read_text("utf-8") if path.stat().st_size <= _TEXT_MAX else None
    except (OSError, UnicodeDecodeError):
        return None


def _files(directory: Path) -> Iterator[Path]:
    """Yield every file below, following links, which `scan` found to stay inside."""
    for at, directories, names in os.walk(directory, followlinks=True):
        directories.sort()
        yield from (Path(at) / name for name in sorted(names))


def _image(task: Task) -> Iterator[str]:
    dockerfile = task.directory / ENVIRONMENT / "Dockerfile"
    text = _read(dockerfile)
    if text is None:
        return
    if task.environment.docker_image is not None:
        if task.dialect_name == "harbor":
            return  # there it is what was built from the Dockerfile before, and both are usual
        yield (
            f"{dockerfile}: not built, since {CONFIG} names docker_image {task.environment.docker_image}: remove one "
            "of them"
        )
        return
    try:
        sources = list(copied(text))
    except DockerfileError as error:
        yield f"{dockerfile}: {error.message.removeprefix('the Dockerfile ')}: the build will fail"
        return
    for one in sources:
        if why := missing_source(one.source, dockerfile.parent):
            yield f"{dockerfile}:{one.line}: {one.instruction} {one.source}: it {why}: the build will fail"


def _solutions(task: Task) -> Iterator[str]:
    for step in task.steps:
        solve = None if step.solution is None else task.directory / step.solution / "solve.sh"
        if solve is None or not solve.is_file():
            where = step.solution or (f"steps/{step.name}/solution" if step.name else SOLUTIONS[0])
            yield f"{task.directory}: there is no {where}/solve.sh: nothing shows that the task can be done"


def _variables(task: Task, environ: Mapping[str, str]) -> Iterator[str]:
    environments = [("environment", task.environment.env), ("solution", task.solution_env)]
    environments += [("verifier", step.verifier.env) for step in task.steps]
    for section, env in environments:
        for name, names in missing(env, environ).items():
            yield f"{task.directory / CONFIG}: {section}.env: {lacks(name, names)}"


def _verifier(task: Task, step: Step) -> Iterator[str]:
    texts = [text for tests in step.tests for path in _files(task.directory / tests) if (text := _read(path))]
    if not any(REWARD_TEXT in text or REWARD_JSON in text for text in texts):
        yield (
            f"{task.directory / step.tests[-1]}: no file there names {REWARD_TEXT} or {REWARD_JSON}: every trial will "
            f"end in verifier_reward_missing unless something writes /logs/verifier/{REWARD_TEXT}"
        )
    for tests in step.tests:
        script = task.directory / tests / "test.sh"
        text = _read(script)
        if text is not None:
            yield from _test_script(script, text, exit_code_counts=task.dialect.exit_code_counts)


def _test_script(path: Path, text: str, *, exit_code_counts: bool) -> Iterator[str]:
    lines = text.splitlines()
    errexit = next((number for number, line in enumerate(lines, 1) if _ERREXIT.match(line)), None)
    for number, line in enumerate(lines, 1):
        if errexit is not None and number > errexit and _STATUS_TEST.match(line):
            yield (
                f"{path}:{number}: is never reached after a command that failed, since `set -e` (line {errexit}) ends "
                "the script there, before it writes a reward: write `if COMMAND; then`"
            )
        if exit_code_counts and _EXIT_STATUS.match(line):
            yield (
                f"{path}:{number}: in this task's format a test script that exits with another code than 0 is "
                'verifier_failed, and its reward does not count: exit with 0, or say schema_version = "1.4" in '
                f"{CONFIG}"
            )


def _services(task: Task) -> Iterator[str]:
    for step in task.steps:
        verifier = step.verifier
        solve = None if step.solution is None else task.directory / step.solution / "solve.sh"
        text = None if solve is None or verifier.keeps_processes or verifier.mode == "separate" else _read(solve)
        if text is None or _ENDS_THEM.search(text):
            continue
        number = next(
            (number for number, line in enumerate(text.splitlines(), 1) if _SERVICE.search(_COMMENT.sub("", line))),
            None,
        )
        if number is not None:
            yield (
                f"{solve}:{number}: starts what goes on after the script, and in this task's format it is ended before "
                f"verification: if the tests need it, say keep_processes = true under [verifier] in {CONFIG}"
            )


def _scripts(task: Task) -> Iterator[str]:
    """Yield warnings about scripts that bash will run."""
    directories = {directory for step in task.steps for directory in (*step.tests, step.solution) if directory}
    bash = shutil.which("bash")
    for directory in sorted(directories):
        for name in ("test.sh", "solve.sh"):
            path = task.directory / directory / name
            try:
                raw = path.read_bytes()
            except OSError:
                continue
            if b"\r\n" in raw:
                line = raw[: raw.index(b"\r\n")].count(b"\n") + 1
                yield (
                    f"{path}:{line}: ends with a carriage return, which bash takes for a part of the command: save "
                    "the file with Unix line ends"
                )
            elif bash and (not raw.startswith(b"#!") or _SHELL.match(raw)):
                yield from _syntax(bash, path)


def _syntax(bash: str, path: Path) -> Iterator[str]:
    try:
        done = run([bash, "--norc", "-n", path.absolute()], timeout_s=_BASH_S)
    except OSError:
        return
    if done.code == 0:
        return
    first = done.stderr.partition("\n")[0]
    told = _OF_BASH.match(first)
    yield f"{path}:{told[1]}: {told[2]}" if told else f"{path}: bash cannot read it: {first}"


def _leaks(task: Task) -> Iterator[str]:
    """Yield tests and solutions that are also, with the same name and bytes, where an image is built from."""
    kept: dict[tuple[str, bytes], Path] = {}
    directories = {directory for step in task.steps for directory in (*step.tests, step.solution) if directory}
    for directory in sorted(directories):
        for path in _files(task.directory / directory):
            if _SECRET.fullmatch(path.name) and path.stat().st_size:
                kept.setdefault((path.name, hash_file(path)[0]), path)
    for path in _files(task.directory / ENVIRONMENT):
        if not _SECRET.fullmatch(path.name):
            continue
        same = kept.get((path.name, hash_file(path)[0]))
        if same is not None:
            name = same.relative_to(task.directory)
            yield f"{path}: the same file as {name}: an image that copies it shows it to the agent"

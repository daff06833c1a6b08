"""A Dockerfile as carried out in a sandbox: its steps, and what holds for commands afterwards."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollout.workloads.job.dockerfile import DockerfileError, Heredoc, Instruction, expand, split, unquote

_SHELL = ("/bin/sh", "-c")
_SILENT = ("CMD", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL")
"""Instructions that change nothing for commands in a sandbox."""


@dataclass(frozen=True, slots=True)
class Run:
    """A command of the build."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    user: str | None
    line: int
    text: str  # as the Dockerfile has it


@dataclass(frozen=True, slots=True)
class Copy:
    """Files of the context, or from the Dockerfile itself, to be copied to `target`."""

    sources: tuple[str, ...]
    target: str
    into: bool  # `target` is a directory, whether it exists or not
    line: int
    extract: bool = False
    owner: str | None = None
    mode: str | None = None
    heredocs: tuple[Heredoc, ...] = ()


@dataclass(frozen=True, slots=True)
class Directory:
    """A directory that must exist."""

    path: str
    line: int


Step = Run | Copy | Directory


def read(instructions: Sequence[Instruction], inherited: Mapping[str, str], *, workdir: str = "/") -> Recipe:
    """Return the recipe of the last stage, with the stages it is based on. `inherited` are the variables of its base.

    Raises DockerfileError with everything that cannot be carried out.
    """
    globals_: dict[str, str] = {}
    for one in instructions[: _first_from(instructions)]:  # all of those are ARG
        globals_ |= {name: value or "" for name, value in _assignments(one, globals_)}
    stages = _stages(instructions, globals_)
    chain = [stages[-1]]
    while (earlier := _named(stages[: chain[0].number], chain[0].base)) is not None:
        chain.insert(0, earlier)
    recipe = Recipe(chain[0].base, globals_, inherited, workdir)
    for stage in chain:
        for one in stage.instructions:
            recipe.take(one)
    if recipe.faults:
        raise DockerfileError("the Dockerfile cannot be carried out here: " + "; ".join(recipe.faults))
    return recipe


def base_of(instructions: Sequence[Instruction]) -> str:
    """Return the image that the last stage starts with."""
    return read([one for one in instructions if one.name in ("ARG", "FROM")], {}).base


@dataclass(slots=True)
class _Stage:
    number: int
    base: str
    name: str
    instructions: list[Instruction] = field(default_factory=list[Instruction])


def _first_from(instructions: Sequence[Instruction]) -> int:
    return next(n for n, one in enumerate(instructions) if one.name == "FROM")


def _stages(instructions: Sequence[Instruction], values: Mapping[str, str]) -> list[_Stage]:
    stages: list[_Stage] = []
    for one in instructions[_first_from(instructions) :]:
        if one.name != "FROM":
            stages[-1].instructions.append(one)
            continue
        words = split(one.value, values)
        if len(words) not in (1, 3) or (len(words) == 3 and words[1].upper() != "AS") or not words[0]:
            raise DockerfileError(f"Dockerfile, line {one.line}: FROM names no image: {one.value}")
        stages.append(_Stage(len(stages), words[0], words[2].lower() if len(words) == 3 else ""))
    return stages


def _named(stages: Sequence[_Stage], name: str) -> _Stage | None:
    return next((stage for stage in reversed(stages) if stage.name and stage.name == name.lower()), None)


def _assignments(one: Instruction, values: Mapping[str, str]) -> list[tuple[str, str | None]]:
    """Parse ENV and ARG: NAME=VALUE ..., ENV NAME VALUE, ARG NAME. All see the variables as they were before."""
    first = one.value.split(None, 1)
    if one.name == "ENV" and first and "=" not in first[0]:
        if len(first) < 2:
            raise DockerfileError(f"Dockerfile, line {one.line}: ENV {one.value} has no value")
        return [(first[0], unquote(first[1], values))]
    pairs: list[tuple[str, str | None]] = []
    for word in split(one.value, values):
        name, equals, value = word.partition("=")
        pairs.append((name, value if equals else None))
    return pairs


class Recipe:
    """The result of instructions taken one after the other.

    `base` is the image of FROM, or `scratch`. `remarks` are sentences on what is not done. `entrypoint` is None if that
    of the base holds.
    """

    def __init__(self, base: str, globals_: Mapping[str, str], inherited: Mapping[str, str], workdir: str) -> None:
        self.base = base
        self.steps: list[Step] = []
        self.remarks: list[str] = []
        self.faults: list[str] = []
        self.workdir: str | None = None
        self.user: str | None = None
        self.entrypoint: tuple[str, ...] | None = None
        self._begun = workdir
        self._globals = globals_
        self._inherited = inherited
        self._set: dict[str, str] = dict(inherited)
        self._arguments: dict[str, str] = {}
        self._shell = _SHELL

    @property
    def env(self) -> dict[str, str]:
        """Variables that ENV set."""
        return {name: value for name, value in self._set.items() if self._inherited.get(name) != value}

    @property
    def directories(self) -> tuple[str, ...]:
        """Directories that the recipe makes or copies into."""
        found: dict[str, None] = {}
        for step in self.steps:
            if isinstance(step, Directory):
                found[step.path] = None
            elif isinstance(step, Copy):
                found[step.target if step.into else posixpath.dirname(step.target)] = None
        return tuple(path for path in found if path != "/")

    @property
    def _values(self) -> dict[str, str]:
        return {**self._arguments, **self._set}

    @property
    def _where(self) -> str:
        return self.workdir or self._begun

    def take(self, one: Instruction) -> None:
        handle = {
            "ADD": self._copy,
            "ARG": self._arg,
            "COPY": self._copy,
            "ENTRYPOINT": self._set_entrypoint,
            "ENV": self._set_env,
            "HEALTHCHECK": self._not_run,
            "RUN": self._run,
            "SHELL": self._set_shell,
            "USER": self._set_user,
            "VOLUME": self._volume,
            "WORKDIR": self._change_directory,
        }.get(one.name)
        if handle is not None:
            handle(one)
        elif one.name not in _SILENT:
            self.remarks.append(f"{one.name} (line {one.line}) has no effect here")

    def _fault(self, one: Instruction, why: str) -> None:
        self.faults.append(f"line {one.line}: {one.name}: {why}")

    def _not_run(self, one: Instruction) -> None:
        if one.value.upper() != "NONE" and one.value != "[]":
            self.remarks.append(f"{one.name} (line {one.line}) is not run")

    def _set_entrypoint(self, one: Instruction) -> None:
        if one.value.strip() == "[]":
            self.entrypoint = ()
        else:
            self.entrypoint = one.words or (*self._shell, one.value)

    def _arg(self, one: Instruction) -> None:
        for name, value in _assignments(one, self._values):
            value = self._globals.get(name) if value is None else value
            if value is not None:
                self._arguments[name] = value

    def _set_env(self, one: Instruction) -> None:
        for name, value in _assignments(one, self._values):
            if value is None:
                self._fault(one, f"{name} has no value")
            else:
                self._set[name] = value

    def _set_shell(self, one: Instruction) -> None:
        if not one.words:
            self._fault(one, "it must be a JSON list of a program and its arguments")
        else:
            self._shell = one.words

    def _set_user(self, one: Instruction) -> None:
        self.user = expand(one.value, self._values).strip().partition(":")[0] or None

    def _change_directory(self, one: Instruction) -> None:
        path = unquote(one.value, self._values).strip()
        if not path:
            self._fault(one, "it names no directory")
            return
        self.workdir = posixpath.normpath(posixpath.join(self._where, path))
        self.steps.append(Directory(self.workdir, one.line))

    def _volume(self, one: Instruction) -> None:
        for path in one.words or split(one.value, self._values):
            self.steps.append(Directory(posixpath.normpath(posixpath.join("/", path)), one.line))

    def _run(self, one: Instruction) -> None:
        for name, value in one.flags:
            kind = next((pair[5:] for pair in value.split(",") if pair.startswith("type=")), "bind")
            if name == "mount" and kind in ("cache", "tmpfs"):
                self.remarks.append(f"RUN --mount={value} (line {one.line}) is an ordinary directory")
            elif name == "mount":
                self._fault(one, f"--mount={value} is not done here")
            else:
                self.remarks.append(f"RUN --{name}={value} (line {one.line}) has no effect here")
        text = one.value
        if one.words:
            argv = one.words
        elif len(one.heredocs) == 1 and text.lstrip("<-").strip("\"'") == one.heredocs[0].name:
            argv = _script(one.heredocs[0].text, self._shell)
        else:
            bodies = "".join(f"\n{h.text}{h.name}" for h in one.heredocs)
            argv = (*self._shell, text.replace("<<-", "<<") + bodies if bodies else text)
        self.steps.append(Run(argv, self._values, self._where, self.user, one.line, text))

    def _copy(self, one: Instruction) -> None:
        values = self._values
        words = [expand(word, values) for word in one.words] if one.words else split(one.value, values)
        for name, value in one.flags:
            if name == "from":
                self._fault(one, f"--from={value} copies from another stage or image, which is not built here")
            elif name not in ("chown", "chmod", "link"):
                self._fault(one, f"--{name}={value} is not done here")
        if len(words) < 2:
            self._fault(one, "it needs a source and a destination")
            return
        *sources, target = words
        for source in sources:
            if one.name == "ADD" and ("://" in source or source.startswith("git@")):
                self._fault(one, f"{source} is not fetched here: use RUN with a program that does")
        by_name = {f"<<{h.name}" for h in one.heredocs} | {f"<<-{h.name}" for h in one.heredocs}
        plain = tuple(source for source in sources if source not in by_name)
        into = target.endswith("/") or len(sources) > 1 or target in (".", "..")
        heredocs = tuple(
            Heredoc(h.name, expand(h.text, values) if h.expand else h.text, h.expand) for h in one.heredocs
        )
        self.steps.append(
            Copy(
                plain,
                posixpath.normpath(posixpath.join(self._where, target)),
                into,
                one.line,
                extract=one.name == "ADD",
                owner=one.flag("chown"),
                mode=one.flag("chmod"),
                heredocs=heredocs,
            )
        )


def _script(text: str, shell: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command for a heredoc that is the whole RUN: for the shell, or for the program of its first line."""
    if not text.startswith("#!"):
        return (*shell, text)
    program = 'f=$(mktemp) && printf \'%s\' "$1" >"$f" && chmod 700 "$f" && "$f"; c=$?; rm -f "$f"; exit $c'
    return (*_SHELL, program, "run", text)

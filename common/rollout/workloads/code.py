"""The code of a run: which files of a directory are sent, and whether the function is among them, without running
any."""

from __future__ import annotations

import ast
import difflib
import os
import re
import stat
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pathspec
from blake3 import blake3

from rollout.model.errors import ConfigError
from rollout.objects.digest import hash_file
from rollout.objects.tree import Tree, TreeFile
from rollout.security.files import IDENTITY, KEYS
from rollout.workloads.modules import SHOWN, definition, functions_in, is_installed, module_file

IGNORE_FILES = (".rolloutignore", ".gitignore")
"""The first of these that exists says, in the syntax of .gitignore, what is not sent."""
MAX_BYTES = 256 << 20
MAX_FILES = 20_000
_TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_LOGS = (".log", "nohup.out")
_LEFT_OUT = frozenset({"__pycache__", "node_modules", "venv", "site-packages"})
_MARKS = ("pyvenv.cfg", "run-id", "owner.lock")
"""Files that mark a directory as not being code."""
_OF_OUR_PROGRAMS = pathspec.GitIgnoreSpec.from_lines(
    ["/data/rollout.db*", "/data/object-store/", "/data/object-cache/", "/data/object-cache-trees/", "/data/scratch/"]
)
"""Where coordinator and worker keep their data if started in the code directory; it changes all the time."""


@dataclass(frozen=True, slots=True)
class Code:
    """Files to send, as (name in the tree, file), and the content id of their tree.

    `new` are names that would be sent too if they had existed when the run began.
    """

    directory: Path
    files: tuple[tuple[str, Path], ...]
    tree: Tree
    new: tuple[str, ...] = ()

    @property
    def manifest(self) -> str:
        return self.tree.id.hex()


def check_target(target: str, root: Path) -> None:
    """Raise ConfigError unless it is `PKG.MODULE:FUNCTION`; if the module is in `root`, the message names its
    functions."""
    if _TARGET.fullmatch(target):
        return
    written, _, name = target.partition(":")
    module = written.removesuffix(".py").removeprefix("./").strip("/").replace("/", ".")
    file = module_file(root, module)
    if file is None and not name and "." in module:  # package.module.function
        module, _, name = module.rpartition(".")
        file = module_file(root, module)
    functions = functions_in(file) if file is not None else []
    if name in functions:
        functions = [name]
    hint = f": write {' or '.join(f'{module}:{one}' for one in functions[:SHOWN])}" if functions else ""
    raise ConfigError(
        f"{target!r} does not name a function as MODULE:FUNCTION"
        f"{hint or ' (module:function stands for function() in module.py)'}"
    )


Check = Callable[[Path, str, ast.stmt], None]
"""Called with (file, name, defining statement). Raises ConfigError if that cannot be called as it will be."""
_CODE_OPTION = "--code DIR (in Python: code=DIR)"


def find_code(
    target: str,
    directory: Path | None,
    leave_out: Collection[Path] = (),
    began: Tree | None = None,
    check: Check | None = None,
) -> Code | None:
    """Find the code that contains `target` in `directory`, or in the current one if the module is there.

    Returns None if the module is installed. `leave_out` are files and directories that do not belong to it, such as
    input and output. `began` is the code of the run to resume, see `read_code`. `check` checks the function's
    definition; by default, that it takes a row. Nothing is imported. Raises ConfigError with the fault of the
    directory, or where the function is missing.
    """
    if directory is not None and not directory.is_dir():
        raise ConfigError(f"--code {directory}: there is no such directory")
    travels = holds(target, directory, check or check_callable)
    return read_code(directory or Path.cwd(), leave_out, began) if travels else None


def holds(target: str, directory: Path | None, check: Check, option: str = _CODE_OPTION) -> bool:
    """Return whether the code of `target` is sent; False if it is installed. It is a part of `find_code`.

    `option` is the one by which a user names the code.
    """
    root = directory or Path.cwd()
    check_target(target, root)
    module, _, name = target.partition(":")
    file = module_file(root, module)
    if file is None:
        if not is_installed(module):
            raise ConfigError(_missing(module, root, option if directory is None else ""))
        return directory is not None
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names:
        raise ConfigError(f"{file}: Python's own library has a module {top}, which workers import: rename this one")
    made = definition(file, name)
    if made is not None and "." not in name:
        check(file, name, made)
    return True


def shadowed(code: Code) -> list[str]:
    """Return files at the top of the code that cannot be imported, because standard library modules have their
    names."""
    return [name for name, _ in code.files if name.endswith(".py") and name[:-3] in sys.stdlib_module_names]


def _missing(module: str, root: Path, option: str) -> str:
    """Return the message for a missing module. `option` is empty if it was given."""
    names = [path.stem for path in root.glob("*.py")] + [path.parent.name for path in root.glob("*/__init__.py")]
    near = difflib.get_close_matches(module, names, 1)
    place = f"the current directory {root}" if option else str(root)
    text = f"there is no module {module!r} in {place}, nor is it installed"
    if near:
        return f"{text}; did you mean module {near[0]}?"
    return f"{text}; say where it is with {option}" if option else text


def check_callable(file: Path, name: str, made: ast.stmt) -> None:
    """Raise ConfigError if the definition shows that it cannot be called with just a row."""
    if isinstance(made, ast.ClassDef):
        methods = {part.name for part in made.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)}
        if not made.bases and not made.keywords and not made.decorator_list and "__call__" not in methods:
            raise ConfigError(
                f"{file}:{made.lineno}: class {name} has no __call__(self, row), which is called for each row"
            )
    elif isinstance(made, ast.FunctionDef | ast.AsyncFunctionDef) and not made.decorator_list:
        arguments = made.args
        positional = len(arguments.posonlyargs) + len(arguments.args)
        needed = positional - len(arguments.defaults)
        needed += sum(default is None for default in arguments.kw_defaults)
        if needed > 1 or (not positional and arguments.vararg is None):
            raise ConfigError(f"{file}:{made.lineno}: {name} must take one argument, the row")


# ---- the files


def read_code(
    directory: Path, leave_out: Collection[Path] = (), began: Tree | None = None, *, hidden: Collection[str] = ()
) -> Code:
    """Return what is sent of `directory`, hashed. Raises ConfigError if that is too much, and what makes it so.

    `hidden` are names of files at its top that are sent although they begin with a dot.

    `began` is the code of the run to resume. It continues with exactly these files: later additions do not belong to
    it, and ConfigError names the changed ones.
    """
    root = directory.resolve()
    files = tuple(sorted(_walk(root, {path.resolve() for path in leave_out}, hidden)))
    new: tuple[str, ...] = ()
    if began is not None:
        own = [file.path for file in began.files]
        new = tuple(sorted({name for name, _ in files}.difference(own)))
        files = tuple((name, root / name) for name in own if (root / name).is_file())
    sizes: Counter[str] = Counter()
    for name, path in files:
        sizes[_part(name)] += path.stat().st_size
    if sizes.total() > MAX_BYTES or len(files) > MAX_FILES:
        raise ConfigError(_too_large(directory, files, sizes))
    try:
        entries = [(name, *hash_file(path), os.access(path, os.X_OK)) for name, path in files]
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from error
    tree = Tree(tuple(TreeFile(name, size, digest, executable) for name, digest, size, executable in entries))
    if began is not None and tree != began:
        raise ConfigError(_other_code(directory, began, tree))
    return Code(root, files, tree, new)


def stamp(directory: Path, leave_out: Collection[Path] = (), *, hidden: Collection[str] = ()) -> str:
    """Return a stamp that practically always changes when a file that would be sent does (`read_code`), from names,
    sizes and times. It is quick, because no file is read."""
    root = directory.resolve()
    seen = blake3()
    for name, path in sorted(_walk(root, {path.resolve() for path in leave_out}, hidden)):
        with suppress(FileNotFoundError):
            found = path.stat()
            seen.update(f"{name}\0{found.st_size}\0{found.st_mtime_ns}\0".encode("utf-8", "surrogateescape"))
    return seen.hexdigest()


def _other_code(directory: Path, began: Tree, now: Tree) -> str:
    return (
        f"the code directory {directory} is not what the run of this output directory began with: "
        f"{'; '.join(differences(began, now))}. Change it back, or name another output directory to start a new run "
        "with the code as it is"
    )


def differences(began: Tree, now: Tree) -> list[str]:
    """Return `changed: a.py, b.py`, one line for each kind of difference."""
    there = {file.path: file for file in now.files}
    new = sorted(set(there).difference(file.path for file in began.files))
    changed: list[str] = []
    gone: list[str] = []
    for file in began.files:
        found = there.get(file.path)
        if found is None:
            gone.append(file.path)
        elif found != file:
            same = found.object_id == file.object_id
            changed.append(f"{file.path} (its executable bit)" if same else file.path)
    kinds = (("changed", changed), ("gone", gone), ("new", new))
    return [f"{kind}: {listed(names, 5)}" for kind, names in kinds if names]


def listed(names: Sequence[str], most: int) -> str:
    """Return the first `most` names, and the number of others."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def _walk(root: Path, leave_out: set[Path], hidden: Collection[str]) -> Iterator[tuple[str, Path]]:
    spec = _ignored(root)
    written = _standard_output()
    for at, directories, names in os.walk(root, followlinks=False):
        here = Path(at)
        prefix = "" if here == root else here.relative_to(root).as_posix() + "/"
        directories[:] = sorted(
            name
            for name in directories
            if not _unwanted(here / name, leave_out)
            and not spec.match_file(f"{prefix}{name}/")
            and not _OF_OUR_PROGRAMS.match_file(f"{prefix}{name}/")
        )
        # A key of this host must never reach a worker, which could then act as its owner: as an operator, mostly.
        identity = IDENTITY if KEYS.intersection(names) else frozenset[str]()
        for name in names:
            path = here / name
            if name in identity or _OF_OUR_PROGRAMS.match_file(prefix + name):
                continue
            if name.startswith(".") and not (here == root and name in hidden):
                continue
            if name.endswith((".pyc", ".pyo", *_LOGS)) or not path.is_file():
                continue
            if path.resolve() in leave_out or "\\" in name or spec.match_file(prefix + name):
                continue
            found = path.stat()
            if (found.st_dev, found.st_ino) not in written:
                yield prefix + name, path


def _standard_output() -> set[tuple[int, int]]:
    """Return files that receive this process's output, as (device, inode): they grow during the run.

    Examples are `> out.txt`, and on Linux `| tee out.txt` and `| grep x > out.txt`.
    """
    written: set[tuple[int, int]] = set()
    for descriptor in (1, 2):
        with suppress(OSError):  # closed
            found = os.fstat(descriptor)
            written.add((found.st_dev, found.st_ino))
            if stat.S_ISFIFO(found.st_mode):
                _follow_pipe((found.st_dev, found.st_ino), written)
    return written


def _follow_pipe(pipe: tuple[int, int], written: set[tuple[int, int]]) -> None:
    """Add the files that processes with the pipe as standard input have open for writing."""
    for stdin in Path("/proc").glob("[0-9]*/fd/0"):
        with suppress(OSError):  # it ended, or is somebody else's
            found = stdin.stat()
            if (found.st_dev, found.st_ino) != pipe:
                continue
            for opened in stdin.parent.iterdir():
                if not opened.lstat().st_mode & stat.S_IWUSR:
                    continue
                found = opened.stat()
                into = (found.st_dev, found.st_ino)
                if into not in written:
                    written.add(into)
                    if stat.S_ISFIFO(found.st_mode):
                        _follow_pipe(into, written)


def _ignored(root: Path) -> pathspec.GitIgnoreSpec:
    for name in IGNORE_FILES:
        file = root / name
        if file.is_file():
            try:
                return pathspec.GitIgnoreSpec.from_lines(file.read_text("utf-8", "replace").splitlines())
            except (OSError, ValueError) as error:
                raise ConfigError(f"{file} cannot be read: {error}") from error
    return pathspec.GitIgnoreSpec.from_lines([])


def _unwanted(path: Path, leave_out: set[Path]) -> bool:
    """Return whether it is hidden, a cache, a virtual environment, an output directory, or that of a private
    cluster."""
    hidden = path.name.startswith(".") or path.name in _LEFT_OUT or path.name.endswith(".egg-info")
    return hidden or path.resolve() in leave_out or any((path / mark).exists() for mark in _MARKS)


def _part(name: str) -> str:
    """Return the directory that a file counts towards in messages: at most two levels deep."""
    parts = name.split("/")[:-1][:2]
    return "/".join(parts) + "/" if parts else "files at the top"


def _too_large(directory: Path, files: Sequence[tuple[str, Path]], sizes: Counter[str]) -> str:
    largest = ", ".join(f"{name} {size / (1 << 20):.0f} MiB" for name, size in sizes.most_common(5))
    counts = Counter(_part(name) for name, _ in files)
    many = ", ".join(f"{name} {count}" for name, count in counts.most_common(3))
    return (
        f"the code directory {directory} is too large to travel: {sizes.total() >> 20} MiB in {len(files)} files, "
        f"{MAX_BYTES >> 20} MiB and {MAX_FILES} files are the most. Largest: {largest}; most files: {many}. List what "
        f"the function does not need in {directory / IGNORE_FILES[0]} (as in .gitignore), or name a smaller directory "
        "as that of the code"
    )

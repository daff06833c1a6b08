"""pytest for `rollout test`, run by path with the project's own Python (3.8 or newer, pytest 7 or newer):

    PYTHON pytest_runner.py collect --out FD|PATH [arguments of pytest]

`collect` writes a JSON object a line:
  {"case": {"id", "file", "line", "scope", "markers"}}
  {"collect_error": {"id", "message", "details"}}: a file or a test that cannot be used
  {"collect_skip": {"id", "message"}}: a file that skips itself when it is imported
  {"collected": number of cases, "pytest": its version, "rootdir": what ids and files are relative to}
It exits with 0 after the last of them, else with pytest's own exit code, and pytest's words on stderr or stdout.

It imports nothing of Rollout. Options that would spread, stop or repeat tests by themselves have no effect here.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

try:
    import pytest
except ImportError as error:
    sys.exit(f"pytest cannot be imported by {sys.executable}: {error}. Install pytest there, or name another Python")

ID_MAX = 8 << 10
TEXT_MAX = 64 << 10
"""Characters of a text that are kept: the first and the last half."""

_WITHOUT_EFFECT: dict[str, Any] = {
    "numprocesses": 0, "maxprocesses": None, "dist": "no", "distload": False, "tx": [], "looponfail": False,
    "maxfail": 0, "usepdb": False, "trace": False,
    "lf": False, "failedfirst": False, "newfirst": False, "stepwise": False, "stepwise_skip": False,
    "xmlpath": None, "htmlpath": None,
}  # fmt: skip
"""Options of pytest, pytest-xdist and pytest-html. Several processes would write to the files of the last ones."""


def shorten(text: str) -> str:
    if len(text) <= TEXT_MAX:
        return text
    half = TEXT_MAX // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def clean(text: str) -> str:
    """What can be written as UTF-8: names of files may hold other bytes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


class Tamed:
    """Keeps options of the project (`addopts`) from spreading, stopping or reordering what is to be run here."""

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_load_initial_conftests(self, early_config: pytest.Config) -> Iterator[None]:
        if hasattr(early_config.known_args_namespace, "cov_source"):
            early_config.known_args_namespace.cov_source = []  # pytest-cov measures one process, and writes one file
        yield

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> Iterator[None]:
        for name, value in _WITHOUT_EFFECT.items():
            if hasattr(config.option, name):
                setattr(config.option, name, value)
        yield

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        for name in ("lfplugin", "nfplugin", "stepwiseplugin"):  # they write what a run of everything came to
            if config.pluginmanager.has_plugin(name):
                config.pluginmanager.unregister(name=name)


def crash_line(report: Any) -> str:
    """The error of a report, in a line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    lines = [line for line in text.splitlines() if line.strip()]
    line = (lines[0] if crash is not None else lines[-1]).strip() if lines else ""
    return shorten(clean(line[1:].strip() if line.startswith("E  ") else line))


def skip_reason(report: Any) -> str:
    where: Any = report.longrepr
    reason = str(cast(Any, where)[2] if isinstance(where, tuple) else where or "")
    return shorten(clean(reason[9:] if reason.startswith("Skipped: ") else reason))


# ---- collect


class Collector(Tamed):
    def __init__(self, write: Callable[..., None]) -> None:
        self._write = write
        self.whole = False

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            text = report.longreprtext
            self._error(report.nodeid, crash_line(report) or "it cannot be collected", shorten(clean(text)))
        elif report.skipped:
            self._write(collect_skip={"id": clean(report.nodeid), "message": skip_reason(report)})

    def _error(self, nodeid: str, message: str, details: str = "") -> None:
        self._write(collect_error={"id": shorten(clean(nodeid)), "message": message, "details": details})

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Where the tests would be run: nothing failed but files that cannot be collected."""
        items: dict[str, list[pytest.Item]] = {}
        for item in session.items:
            items.setdefault(item.nodeid, []).append(item)
        cases = 0
        scopes = Scopes(session.items)
        for nodeid, same in items.items():
            if len(same) > 1:
                self._error(nodeid, duplicates(len(same)))
            elif len(nodeid) > ID_MAX:
                message = (
                    f"the id of this test has {len(nodeid)} characters, {ID_MAX} are the most: give its parameters ids"
                )
                self._error(nodeid, message)
            elif clean(nodeid) != nodeid:
                self._error(
                    nodeid, "the id of this test is no Unicode text: rename its file, or give its parameters ids"
                )
            else:
                self._write(case=case(same[0], scopes.of(same[0])))
                cases += 1
        self._write(collected=cases, pytest=pytest.__version__, rootdir=str(session.config.rootpath))
        self.whole = True
        return True


def duplicates(count: int) -> str:
    return (
        f"{count} tests have this id, so none can be told from the others: give parameters ids of their own, or name "
        "no file twice"
    )


def case(item: pytest.Item, scope: str) -> dict[str, Any]:
    file, line, _ = item.location
    markers = list(dict.fromkeys(mark.name for mark in item.iter_markers()))
    return {
        "id": item.nodeid,
        "file": clean(file.replace(os.sep, "/")),
        "line": 0 if line is None else line + 1,
        "scope": scope,
        "markers": [clean(name) for name in markers],
    }


class Scopes:
    """Of a test, the widest of module and class whose fixtures it uses (`setup_module` and `setUpClass` are such, too),
    or another test of its class.

    Fixtures of a session or a package are made anew in each process, as with pytest-xdist.
    """

    def __init__(self, items: list[pytest.Item]) -> None:
        self._wide = {
            parent for parent in (_class(item) for item in items if "module" in _fixture_scopes(item)) if parent
        }

    def of(self, item: pytest.Item) -> str:
        group = item.get_closest_marker("xdist_group")
        if group is not None:
            name = group.kwargs.get("name", group.args[0] if group.args else "default")
            return f"@{clean(str(name))}"
        scopes = _fixture_scopes(item)
        if "module" in scopes or _class(item) in self._wide:
            return _parent(item, pytest.Module)
        return _class(item) if "class" in scopes else ""


def _fixture_scopes(item: pytest.Item) -> set[str]:
    info = getattr(item, "_fixtureinfo", None)
    fixtures: dict[str, Any] = info.name2fixturedefs if info is not None else {}
    return {definition.scope for definitions in fixtures.values() for definition in definitions}


def _class(item: pytest.Item) -> str:
    return _parent(item, pytest.Class)


def _parent(item: pytest.Item, kind: type[pytest.Collector]) -> str:
    parent = item.getparent(kind)
    return parent.nodeid if parent is not None else ""


def collect(out: str, arguments: list[str]) -> int:
    with open(int(out) if out.isdigit() else out, "w", encoding="utf-8") as file:  # noqa: PTH123

        def write(**event: Any) -> None:
            file.write(json.dumps(event) + "\n")

        collector = Collector(write)
        code = int(pytest.main([*arguments, "--collect-only", "-qq"], plugins=[collector]))
    return 0 if collector.whole else code or 1


def main() -> int:
    mode, flag, out, *arguments = sys.argv[1:]
    # Not the directory of this file, whose modules have names that the project's may have, too; the current one, as
    # with `python -m pytest`.
    sys.path[0] = os.getcwd()  # noqa: PTH109
    sys.argv = ["pytest", *arguments]
    if (mode, flag) == ("collect", "--out"):
        return collect(out, arguments)
    sys.exit(f"usage: {sys.executable} pytest_runner.py collect --out FD|PATH [arguments of pytest]")


if __name__ == "__main__":
    sys.exit(main())

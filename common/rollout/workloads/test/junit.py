"""JUnit XML: writes one merged file of a run, and reads files of other frameworks.

The elements are Surefire's, which CI servers and nextest use: the first failure of a test that never passed is its
`failure`, later ones are `rerunFailure`; those of a test that passed in the end are `flakyFailure`.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (junitparser's attributes have no types)

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any
from xml.etree import ElementTree

from junitparser import JUnitXmlError, junitparser, xunit2

from rollout.model.errors import InputError
from rollout.workloads.test.cases import GOOD, ID_MAX, OUTPUT_MAX, Case, CaseResult, Outcome, Try

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_ERRORS = frozenset({Outcome.ERROR, Outcome.CRASHED, Outcome.TIMEOUT})
_KINDS = {
    "crashed": Outcome.CRASHED,
    "timeout": Outcome.TIMEOUT,
    "test abort": Outcome.CRASHED,
    "test timeout": Outcome.TIMEOUT,
}
"""Outcomes by the type of a failure: our types and nextest's."""
_XFAIL = "pytest.xfail"
"""The type of `skipped` as pytest writes it."""


class _Interim(xunit2.InterimResult):
    time = junitparser.FloatAttr()
    timestamp = junitparser.Attr()


class _FlakyFailure(_Interim):
    _tag = "flakyFailure"


class _FlakyError(_Interim):
    _tag = "flakyError"


class _RerunFailure(_Interim):
    _tag = "rerunFailure"


class _RerunError(_Interim):
    _tag = "rerunError"


class _TestCase(xunit2.TestCase):
    file = junitparser.Attr()
    line = junitparser.Attr()
    timestamp = junitparser.Attr()
    ITER_TYPES = {
        **junitparser.TestCase.ITER_TYPES,
        "flakyFailure": _FlakyFailure,
        "flakyError": _FlakyError,
        "rerunFailure": _RerunFailure,
        "rerunError": _RerunError,
    }


class _TestSuite(xunit2.TestSuite):
    testcase = _TestCase


class _JUnitXml(xunit2.JUnitXml):
    testsuite = _TestSuite


def plain(text: str) -> str:
    """Return text that XML can hold: other characters as `#x1B`, like pytest, and line ends as XML reads them."""
    return _NOT_XML.sub(lambda found: f"#x{ord(found[0]):02X}", text).replace("\r\n", "\n").replace("\r", "\n")


def junit_xml(results: Iterable[tuple[Case, CaseResult]], name: str) -> bytes:
    """Return the file of a run called `name`, with a suite for each group. It has the output of failed tries only."""
    suites: dict[str, _TestSuite] = {}
    for case, result in results:
        suite = suites.get(case.group)
        if suite is None:
            suite = suites[case.group] = _TestSuite(plain(case.group) or "tests")
        suite.append(_test_case(case, result))
    xml = _JUnitXml(plain(name))
    for suite in suites.values():
        xml.append(suite)
    xml.update_statistics()
    return b'<?xml version="1.0" encoding="utf-8"?>\n' + xml.tostring()


def _test_case(case: Case, result: CaseResult) -> _TestCase:
    classname, name = names(case)
    tries, good = result.tries, result.good
    shown = tries[-1] if good else tries[0]
    entry = _TestCase(plain(name), plain(classname), round(shown.seconds, 6))
    if case.file:
        entry.file = plain(case.file)
    if case.line:
        entry.line = str(case.line)
    if shown.started:
        entry.timestamp = _timestamp(shown.started)
    facts = {"id": case.id, "status": result.status.value, "outcome": shown.outcome.value, "worker": shown.worker}
    for key, value in facts.items():
        entry.add_property(key, plain(value))
    if shown.outcome in (Outcome.SKIPPED, Outcome.XFAILED):
        kind = _XFAIL if shown.outcome is Outcome.XFAILED else f"{case.framework}.skip"
        entry.append(_with_text(junitparser.Skipped(plain(shown.message), kind), shown.details))
    elif shown.outcome not in GOOD:
        kind = junitparser.Error if shown.outcome in _ERRORS else junitparser.Failure
        entry.append(_with_text(kind(plain(shown.message), shown.outcome.value), shown.details))
        for stream, text in ((junitparser.SystemOut, shown.stdout), (junitparser.SystemErr, shown.stderr)):
            if text:
                entry.append(stream(plain(text)))
    for other in tries[:-1] if good else tries[1:]:
        entry.append(_interim(other, good))
    return entry


def _interim(one: Try, good: bool) -> _Interim:
    """Return the element of an additional try. `good` means that the test passed in the end."""
    if one.outcome in _ERRORS:
        kind = _FlakyError if good else _RerunError
    else:
        kind = _FlakyFailure if good else _RerunFailure
    entry = kind(plain(one.message), one.outcome.value)
    entry.time = round(one.seconds, 6)
    if one.started:
        entry.timestamp = _timestamp(one.started)
    if one.details:
        entry.stack_trace = plain(one.details)
    if one.stdout:
        entry.system_out = plain(one.stdout)
    if one.stderr:
        entry.system_err = plain(one.stderr)
    return entry


def _with_text(entry: junitparser.FinalResult, text: str) -> junitparser.FinalResult:
    entry.text = plain(text)
    return entry


def _timestamp(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds")


def names(case: Case) -> tuple[str, str]:
    """Return `classname` and `name` of a test, as its framework's own JUnit has them."""
    if case.framework == "pytest":
        plain_id, bracket, parameters = case.id.partition("[")
        path, *inner = plain_id.split("::")
        if not inner:
            return "", case.id
        return ".".join([path.removesuffix(".py").replace("/", "."), *inner[:-1]]), inner[-1] + bracket + parameters
    first, separator, rest = case.id.partition(" > " if case.framework in ("vitest", "jest") else " ")
    return (first, rest) if separator else (case.group, case.id)


def read_junit(data: bytes, where: str, id_format: str) -> list[CaseResult]:
    """Return the tests of a JUnit file, each once, in order. `id_format` makes ids from `{name}`, `{classname}`,
    `{file}` and any property (`{id}` in our files). Raises InputError, naming the file as `where`, if it is not JUnit
    XML."""
    found: dict[str, list[Try]] = {}
    try:
        root: Any = ElementTree.fromstring(data)  # by junitparser, with lxml, entities of files would be read
        for suite in _JUnitXml.fromroot(root):
            for entry in suite:
                found.setdefault(_id_of(entry, id_format)[:ID_MAX], []).extend(_tries(entry))
    except ElementTree.ParseError as error:
        raise InputError(f"{where}: is no XML ({error}): the test command must write JUnit XML there") from None
    except (JUnitXmlError, ValueError) as error:
        raise InputError(f"{where}: is XML, but no JUnit ({error})") from None
    return [CaseResult(id=id, tries=tuple(tries)) for id, tries in found.items() if id]


def _id_of(entry: Any, id_format: str) -> str:
    values: Mapping[str, str | None] = {
        **{str(one.name): one.value for one in entry.properties()},
        "name": entry.name,
        "classname": entry.classname,
        "file": entry.file,
    }
    return _PLACEHOLDER.sub(lambda found: str(values.get(found[1], found[0]) or ""), id_format)


def _tries(entry: Any) -> list[Try]:
    facts = {str(one.name): str(one.value) for one in entry.properties()}
    seconds, started = _seconds(entry.time), _unix_s(entry.timestamp)
    shown = Try(outcome=Outcome.PASSED, seconds=seconds, started=started, worker=facts.get("worker", ""))
    if facts.get("outcome") == Outcome.XPASSED:
        shown = shown.model_copy(update={"outcome": Outcome.XPASSED})
    for result in entry.result[:1]:  # pytest has a second one for an error in teardown
        shown = shown.model_copy(
            update={
                "outcome": _outcome(result),
                "message": _cut(result.message or _said_by_type(result), OUTPUT_MAX),
                "details": _cut(result.text),
                "stdout": _cut(entry.system_out),
                "stderr": _cut(entry.system_err),
            }
        )
    others = [(isinstance(one, _FlakyFailure | _FlakyError), _interim_try(one)) for one in entry.interim_result]
    return [*(one for before, one in others if before), shown, *(one for before, one in others if not before)]


def _interim_try(entry: Any) -> Try:
    return Try(
        outcome=_outcome(entry),
        seconds=_seconds(entry.time),
        started=_unix_s(entry.timestamp),
        message=_cut(entry.message or _said_by_type(entry), OUTPUT_MAX),
        details=_cut(entry.stack_trace or entry.text),
        stdout=_cut(entry.system_out),
        stderr=_cut(entry.system_err),
    )


def _outcome(entry: Any) -> Outcome:
    if isinstance(entry, junitparser.Skipped):
        return Outcome.XFAILED if entry.type == _XFAIL else Outcome.SKIPPED
    if kind := _KINDS.get(entry.type):
        return kind
    return Outcome.ERROR if isinstance(entry, junitparser.Error | _FlakyError | _RerunError) else Outcome.FAILED


def _said_by_type(entry: Any) -> str:
    """Return the message of a test that was ended: nextest gives only the type."""
    return entry.type if str(entry.type).startswith("test ") else ""


def _seconds(value: float | None) -> float:
    return value if value and 0 < value < float("inf") else 0.0


def _unix_s(text: str | None) -> float:
    """Parse a time. Returns 0 if there is none or its format is tool-specific."""
    try:
        return max(datetime.fromisoformat(text or "").timestamp(), 0.0)
    except ValueError:
        return 0.0


def _cut(text: str | None, most: int = 2 * OUTPUT_MAX) -> str:
    return (text or "")[:most]

"""Merged JUnit XML, and JUnit of others."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout.model.errors import InputError
from rollout.workloads.test.cases import GOOD, Case, CaseResult, Outcome, Status, Try
from rollout.workloads.test.junit import junit_xml, names, plain, read_junit

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
fails = sorted(set(Outcome) - GOOD)
ran = sorted({Outcome.PASSED, Outcome.XPASSED})


def tries(outcomes: list[Outcome], quiet: bool = False) -> st.SearchStrategy[Try]:
    said = st.just("") if quiet else text
    return st.builds(
        Try,
        outcome=st.sampled_from(outcomes),
        seconds=st.integers(0, 10**9).map(lambda us: us / 1e6),
        started=st.integers(0, 4 * 10**12).map(lambda ms: ms / 1e3),
        message=said,
        details=said,
        stdout=said,
        stderr=said,
    )


failed = st.lists(tries(fails), max_size=3)
skipped = tries([Outcome.SKIPPED, Outcome.XFAILED]).map(lambda one: one.model_copy(update={"stdout": "", "stderr": ""}))
results = st.lists(
    st.builds(
        CaseResult,
        id=text.filter(lambda id: plain(id) != ""),
        tries=st.one_of(
            st.builds(lambda before, last: (*before, last), failed, tries(ran, quiet=True)),
            failed.filter(bool).map(tuple),
            skipped.map(lambda one: (one,)),
        ),
    ),
    unique_by=lambda result: plain(result.id),
    max_size=5,
)


def as_read(one: Try) -> Try:
    return one.model_copy(update={key: plain(getattr(one, key)) for key in ("message", "details", "stdout", "stderr")})


@given(results, text)
def test_what_is_written_is_read_again(written: list[CaseResult], name: str) -> None:
    data = junit_xml([(Case(id=result.id), result) for result in written], name)
    read = read_junit(data, "junit.xml", "{id}")
    assert [(one.id, one.status) for one in read] == [(plain(one.id), one.status) for one in written]
    assert [list(one.tries) for one in read] == [[as_read(each) for each in one.tries] for one in written]


def result(id: str, *outcomes: Outcome) -> CaseResult:
    return CaseResult(id=id, tries=tuple(Try(outcome=outcome, message=outcome, seconds=1.5) for outcome in outcomes))


def test_words_and_counts_are_those_that_servers_read() -> None:
    found = [
        result("a.py::ok", Outcome.PASSED),
        result("a.py::flaky", Outcome.FAILED, Outcome.CRASHED, Outcome.PASSED),
        result("a.py::bad", Outcome.FAILED, Outcome.TIMEOUT),
        result("b.py::skip", Outcome.SKIPPED),
        result("b.py::crash", Outcome.CRASHED),
    ]
    pairs = [(Case(id=one.id, group="g" if "b.py" in one.id else "", file=one.id[:4], line=3), one) for one in found]
    root = ElementTree.fromstring(junit_xml(pairs, "run"))
    assert root.attrib == {"name": "run", "tests": "5", "failures": "1", "errors": "1", "time": "7.5"}
    assert [suite.attrib["name"] for suite in root] == ["tests", "g"]
    assert [(suite.attrib["tests"], suite.attrib["skipped"]) for suite in root] == [("3", "0"), ("2", "1")]
    inside = {
        case.attrib["name"]: [child.tag for child in case if child.tag != "properties"]
        for case in root.iter("testcase")
    }
    assert inside == {
        "ok": [],
        "flaky": ["flakyFailure", "flakyError"],
        "bad": ["failure", "rerunError"],
        "skip": ["skipped"],
        "crash": ["error"],
    }
    assert root[0][0].attrib == {"name": "ok", "classname": "a", "time": "1.5", "file": "a.py", "line": "3"}


@pytest.mark.parametrize(
    ("framework", "id", "expected"),
    [
        ("pytest", "tests/a.py::Class::test[x::y/z.py]", ("tests.a.Class", "test[x::y/z.py]")),
        ("pytest", "README.md", ("", "README.md")),
        ("nextest", "crate::bin/x mod::test", ("crate::bin/x", "mod::test")),
        ("vitest", "a.test.ts > outer > inner", ("a.test.ts", "outer > inner")),
        ("default", "alone", ("", "alone")),
    ],
)
def test_names_are_those_of_the_framework(framework: str, id: str, expected: tuple[str, str]) -> None:
    assert names(Case(id=id, framework=framework)) == expected


def test_a_test_that_stands_several_times_is_one() -> None:
    xml = b"""<testsuite name="s"><testcase name="a" classname="c" time="1,000.5"><failure message="no">why</failure>
      <error message="teardown"/></testcase><testcase name="a" classname="c" time="nan" timestamp="now"/>
      <testsuite name="inner"><testcase name="b" classname="{name}"><skipped/></testcase></testsuite></testsuite>"""
    first, second = read_junit(xml, "x.xml", "{classname} {name}{other}")
    assert first.id == "c a{other}" and first.status is Status.FLAKY
    assert (first.tries[0].seconds, first.tries[0].message, first.tries[0].details) == (1000.5, "no", "why")
    assert second.id == "{name} b{other}" and second.status is Status.SKIPPED


@pytest.mark.parametrize(
    "data",
    [b"", b"not xml", b"<testsuite><testcase></testsuite>", b"<html/>", b'<testsuite><testcase name="a" time="x"/></testsuite>',
     b"\xff\xfe<"],
)  # fmt: skip
def test_what_is_no_junit_is_named(data: bytes) -> None:
    with pytest.raises(InputError, match=r"^out/x\.xml: "):
        read_junit(data, "out/x.xml", "{name}")

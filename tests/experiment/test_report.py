"""The report of an experiment: one page that needs nothing else, and whose links lead somewhere."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from facts_maker import Truth, make_facts
from rollout.workloads.experiment.analysis.opening import opened
from rollout.workloads.experiment.analysis.report import TASKS_SHOWN, write_report

pytest.importorskip("duckdb")
VARIANTS = {"control": Truth(), "treatment": Truth(shift=1.0, lost=0.1, crash=0.1, bindings={"model": "b"})}
VOID = {"meta", "br"}


class Page(HTMLParser):
    """Tags, ids, links and the text of a page; what is not closed in its order is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.ids = set[str](), set[str]()
        self.links = list[str]()
        self.texts = list[str]()
        self._open = list[str]()
        self.feed(text)
        self.close()
        assert self._open == []
        self.text = " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.ids |= {value or "" for name, value in attrs if name == "id"}
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "action", "srcset", "data")]
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def page_of(run: Path, output: Path, other: Path | None = None, trials: int = 1000) -> Page:
    with opened(run, other, keep=True) as found:
        write_report(found, output, None, trials)
    return Page(output.read_text())


def test_the_page_needs_nothing_else_and_has_every_section(tmp_path: Path) -> None:
    run = make_facts(tmp_path / "run", VARIANTS, tasks=20, margin=0.05)
    page = page_of(run, tmp_path / "x.html")
    assert not page.tags & {"script", "img", "link", "iframe", "object", "base", "form"}
    for wanted in ("@import", "url(", "http:", "https:", "//"):
        assert wanted not in (tmp_path / "x.html").read_text().replace("<!doctype", "")
    assert page.ids >= {"variants", "differences", "metrics", "failures", "flaky", "tasks", "trials", "run"}
    assert "prefers-color-scheme: dark" in page.text and "max-width: 600px" in page.text and "svg" in page.tags
    assert {link[1:] for link in page.links if link.startswith("#")} <= page.ids


@pytest.mark.parametrize("place", [".", "run", "reports"])
def test_links_lead_to_what_a_trial_left_from_wherever_the_page_lies(tmp_path: Path, place: str) -> None:
    run = make_facts(tmp_path / "run", VARIANTS, tasks=2, files=True)
    digest = "ab" + "0" * 62
    (run / f"evidence/artifacts/ab/{digest}").parent.mkdir(parents=True)
    (run / f"evidence/artifacts/ab/{digest}").write_text("diff")
    evidence = {
        "ids": {"run_id": "01K9ABCDEFGHJKMNPQRSTVWXYZ", "trial_id": "trial_000001"},
        "evidence": {"patch_cumulative_ref": f"artifact://sha256/{digest}", "grade_ref": "artifact://sha256/../x"},
        "paths": {"trial_dir": "../../../etc"},
    }
    (run / "evidence/evidence_records.jsonl").write_text(json.dumps(evidence) + "\n")
    (tmp_path / place).mkdir(exist_ok=True)
    page = page_of(run, tmp_path / place / "x #1.html")
    found = [(tmp_path / place / unquote(link)).resolve() for link in page.links if not link.startswith("#")]
    assert all(path.exists() and path.is_relative_to(run.resolve()) for path in found)
    names = {path.relative_to(run.resolve()).as_posix() for path in found}
    assert {
        "trials/trial_000001/stdout.log",
        "trials/trial_000012",
        f"evidence/artifacts/ab/{digest}",
        "facts/trials.jsonl",
        "analysis/load_duckdb.sql",
    } <= names


def test_what_agents_and_tasks_say_is_text_on_the_page(tmp_path: Path) -> None:
    run = make_facts(tmp_path / "run", VARIANTS, tasks=2)
    path = run / "facts/trials.jsonl"
    attack = "<script>alert(1)</script>"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    more = {
        "status": "failed",
        "classification": attack,
        "error_message": attack,
        "task_id": attack,
        "trial_id": attack,
    }
    path.write_text("".join(json.dumps(row | more) + "\n" for row in rows))
    page = page_of(run, tmp_path / "x.html")
    assert "script" not in page.tags and page.texts.count(attack) > 3


def test_of_many_trials_those_that_did_not_pass_are_listed_first(tmp_path: Path) -> None:
    run = make_facts(tmp_path / "run", VARIANTS, tasks=TASKS_SHOWN + 20, replications=1)
    page = page_of(run, tmp_path / "x.html", trials=10)
    assert "The first 10 of 440" in page.text and f"The first {TASKS_SHOWN} of {TASKS_SHOWN + 20}" in page.text
    assert page.texts.count("passed") == 0 and page.texts.count("not passed") > 0
    assert "facts/trials.jsonl" in [unquote(link).removeprefix("run/") for link in page.links]


@pytest.mark.parametrize(("comparison", "variants"), [("unpaired", 3), ("none", 1), ("paired", 1), ("paired", 4)])
def test_every_design_has_a_report(tmp_path: Path, comparison: str, variants: int) -> None:
    named = {f"v{n}": Truth(shift=float(n), bindings={"n": n}) for n in range(variants)}
    page = page_of(make_facts(tmp_path / "run", named, comparison=comparison), tmp_path / "x.html")
    assert ("differences" in page.ids) == (comparison != "none" and variants > 1)
    assert ("trend" in page.ids) == (comparison == "none")


def test_two_runs_have_one_report(tmp_path: Path) -> None:
    runs = [
        make_facts(tmp_path / f"r{n}", {"main": Truth(shift=float(n))}, run_id=f"RUN{n}", files=True) for n in range(2)
    ]
    page = page_of(runs[0], tmp_path / "x.html", runs[1])
    assert "r1/main" in page.text and "to r0/main" in page.text
    assert {link.split("/")[0] for link in page.links if "/trials/" in link} == {"r0", "r1"}


def test_models_and_forks_are_on_the_page(tmp_path: Path) -> None:
    run = make_facts(tmp_path / "run", VARIANTS, tasks=2)
    manifest = run / "facts/run_manifest.json"
    found = json.loads(manifest.read_text()) | {"forked_from": {"run_id": "RUN0", "slots": 3}}
    found["variants"][1] |= {"model": "run:tuned", "model_id": "ab" * 32}
    manifest.write_text(json.dumps(found))
    text = page_of(run, tmp_path / "x.html").text
    assert "engine.model run:tuned (abab" in text and "RUN0, 3 trials of it" in text


def test_a_run_without_a_trial_has_a_report(tmp_path: Path) -> None:
    run = make_facts(tmp_path / "run", VARIANTS, tasks=1)
    (run / "facts/trials.jsonl").write_text("")
    assert "the run has not ended" in page_of(run, tmp_path / "x.html").text

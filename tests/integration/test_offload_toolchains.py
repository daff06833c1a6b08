"""Frameworks that are commands, with the toolchains themselves, where they are installed or their registry answers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from tempfile import mkdtemp

import pytest
from rollout.workloads.test.cases import Batch
from rollout.workloads.test.config import FrameworkSection, GroupSection
from rollout.workloads.test.frameworks import FRAMEWORKS
from rollout.workloads.test.frameworks.port import Ended, Group
from rollout.workloads.test.project import Project

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CARGO = {
    "Cargo.toml": '[package]\nname = "sums"\nversion = "0.1.0"\nedition = "2021"\n',
    "src/lib.rs": """#[cfg(test)] mod tests {
        #[test] fn good() {}
        #[test] fn bad() { println!("said"); assert_eq!(1, 2); }
        #[test] fn dies() { std::process::abort(); }
        #[test] fn hangs() { std::thread::sleep(std::time::Duration::from_secs(60)); }
        #[test] #[ignore] fn ignored() {} }""",
}
GO = {
    "go.mod": "module example.com/sums\n\ngo 1.20\n",
    "a_test.go": """package sums
        import ("os"; "testing"; "time")
        func TestGood(t *testing.T) {}
        func TestBad(t *testing.T) { t.Run("inner", func(t *testing.T) { t.Error("said") }) }
        func TestDies(t *testing.T) { os.Exit(1) }
        func TestHangs(t *testing.T) { time.Sleep(time.Minute) }
        func TestZlast(t *testing.T) { t.Skip() }""",
    "b/b_test.go": "package b\nfunc broken(",
}
JS = """%s
describe('outer (x)', () => { test('good > "ü" $', () => {}); test('bad', () => { throw new Error('said'); }); });
test.skip('skipped', () => {});
test.each(['a b', 'c'])('each %%s', () => {});
"""
IMPORT = "import { test, describe } from 'vitest';"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def outcomes(root: Path, section: dict[str, object], limit_s: float = 5.0) -> dict[str, str]:
    """Of all tests of a project, as a worker runs them: one batch, and another one of what it did not come to."""
    settings = FrameworkSection.model_validate(section)
    framework, project = FRAMEWORKS[settings.kind], Project(root, None)
    group = Group("g", GroupSection(), settings)
    config = framework.group_config(project, group)
    found = framework.discover(project, group, config, lambda text: None)
    assert len({case.id for case in found.cases}) == len(found.cases)
    made = {one.id: one.tries[0].outcome for one in found.results}
    left = [case.id for case in found.cases]
    for _ in range(20):
        if not left:
            break
        out = Path(mkdtemp(prefix=".out", dir=root))
        batch = Batch(group="g", ids=tuple(left), limit_s=limit_s)
        words = framework.command(batch, config, str(out)).words
        done = subprocess.run(words, cwd=root, capture_output=True, text=True)
        ran = framework.results(batch, config, out, Ended(done.returncode, done.stdout, done.stderr))
        made |= {one.id: one.tries[0].outcome for one in ran.cases}
        left = [id for id in left if id not in made]
    return {id: outcome.value for id, outcome in made.items()}


def test_nextest(tmp_path: Path) -> None:
    if (
        shutil.which("cargo") is None
        or subprocess.run(["cargo", "nextest", "--version"], capture_output=True).returncode
    ):
        pytest.skip("cargo-nextest is not installed")
    write(tmp_path, CARGO)
    expected = {"good": "passed", "bad": "failed", "dies": "crashed", "hangs": "timeout"}
    assert outcomes(tmp_path, {"type": "nextest"}) == {f"sums tests::{name}": said for name, said in expected.items()}
    with_ignored = outcomes(tmp_path, {"type": "cargo", "include_ignored": True}, limit_s=1.0)
    assert with_ignored.pop("sums tests::ignored") == "passed" and len(with_ignored) == 4


def test_go(tmp_path: Path) -> None:
    if shutil.which("go") is None:
        pytest.skip("go is not installed")
    write(tmp_path, GO)
    expected = {"Good": "passed", "Bad": "failed", "Dies": "crashed", "Hangs": "timeout", "Zlast": "skipped"}
    assert outcomes(tmp_path, {"type": "go"}, limit_s=1.0) == {
        "example.com/sums/b": "error",
        **{f"example.com/sums Test{name}": said for name, said in expected.items()},
    }


@pytest.mark.parametrize("package", ["vitest@5", "vitest@3", "vitest@1", "jest@30", "jest@29", "jest@27"])
def test_vitest_and_jest(package: str, tmp_path: Path) -> None:
    kind = package.partition("@")[0]
    write(tmp_path, {"package.json": '{"name": "x", "private": true}'})
    npm = shutil.which("npm")
    install = ["npm", "install", "--no-audit", "--no-fund", "--silent", package]
    if npm is None or subprocess.run(install, cwd=tmp_path, capture_output=True).returncode:
        pytest.skip(f"{package} cannot be installed with npm")
    head = IMPORT if kind == "vitest" else ""
    write(tmp_path, {"a.test.js": JS % head, "b.test.js": f"{head}\nnothing();"})
    assert outcomes(tmp_path, {"type": kind}) == {
        "b.test.js": "error",
        'a.test.js > outer (x) > good > "ü" $': "passed",
        "a.test.js > outer (x) > bad": "failed",
        "a.test.js > skipped": "skipped",
        "a.test.js > each a b": "passed",
        "a.test.js > each c": "passed",
    }

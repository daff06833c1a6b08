"""The samples work, pass the checks for authors, and the checks find what is wrong with others."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rollout.model.errors import PluginError
from rollout.plugins.check import plugin_host
from rollout.plugins.suite import check_plugin
from rollout_worker.hosting.channel import Limits
from rollout_worker.hosting.host import PluginHost

Make = Callable[..., Path]
HERE = Path(__file__).parent
MODES = ("python", "sidecar", "cdylib", "environment")


async def test_the_samples_answer(host: PluginHost, samples: Path) -> None:
    for mode in MODES:
        await host.load(samples / mode)
    assert host.names() == ("sample-cdylib", "sample-environment", "sample-python", "sample-sidecar")
    assert await host.call("sample-python", "exact", {"completion": "4", "answer": "5"}, 60) == 0.0
    assert await host.call("sample-sidecar", "overlap", {"completion": "a b", "answer": "b c"}, 60) == 1 / 3
    assert await host.call("sample-cdylib", "echo", {"deep": [1, {"x": "ü"}]}, 60) == {"deep": [1, {"x": "ü"}]}
    assert await host.call("sample-cdylib", "echo", b"\x00\xff", 60) == b"\x00\xff"


async def test_an_environment_has_an_object_for_each_episode(host: PluginHost, samples: Path) -> None:
    await host.load(samples / "environment")

    async def step(episode: str, action: int) -> str:
        arguments = {"episode_id": episode, "action": action, "timeout_s": 1.0}
        return (await host.call("sample-environment", "step", arguments, 60))["observation"]["say"]

    for episode, seed in (("a", 1), ("b", 1), ("c", 2)):
        task = {"task": {"highest": 1000}, "seed": seed, "episode_id": episode}
        await host.call("sample-environment", "reset", task, 60)
    said = [[await step(e, guess) for guess in (137, 500, 900)] for e in "abc"]
    assert said[0] == said[1]
    await host.call("sample-environment", "close", {"episode_id": "a"}, 60)
    with pytest.raises(PluginError, match="not open here"):
        await step("a", 1)


@pytest.mark.parametrize("mode", MODES)
async def test_the_samples_pass_the_checks(samples: Path, mode: str) -> None:
    checks = await check_plugin(samples / mode, plugin_host())
    assert [c for c in checks if not c.passed] == []
    assert len(checks) >= 8


def test_the_command_for_authors(samples: Path, tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rollout.plugins.check", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    good = run(str(samples / "sidecar" / "rollout-plugin.toml"))
    assert good.returncode == 0, good.stdout + good.stderr
    assert "8 of 8 checks passed" in good.stdout
    manifest = samples / "python" / "rollout-plugin.toml"
    manifest.write_text(manifest.read_text().replace("expect = 1.0", "expect = 0.5"))
    bad = run(str(manifest))
    assert bad.returncode == 1
    assert "8 of 9 checks passed" in bad.stdout
    assert run().returncode == 2


async def test_the_checks_find_faults(make: Make, limits: Limits) -> None:
    example = '[[examples]]\nmethod = "{}"\n'
    manifest = make("python", kind="other")
    for method, name in (("leave", "example 1: leave"), ("nan", "example 1: nan")):
        text = manifest.read_text().split("[[examples]]")[0]
        manifest.write_text(text + example.format(method))
        failed = []
        try:
            failed = [
                c.name for c in await check_plugin(manifest, PluginHost(limits=limits), timeout_s=5) if not c.passed
            ]
        except PluginError as e:
            pytest.fail(str(e))
        assert name in failed


async def test_grpc_sidecar(host: PluginHost, tmp_path: Path) -> None:
    shutil.copy(HERE / "grpc_sidecar.py", tmp_path)
    (tmp_path / "rollout-plugin.toml").write_text(
        'name = "grpc-sidecar"\nversion = "1"\nkind = "other"\nmode = "sidecar"\n[config]\nlevel = 3\n'
        '[entry.sidecar]\ncommand = ["python", "grpc_sidecar.py"]\nprotocol = "grpc"\n'
    )
    await host.load(tmp_path)
    assert await host.call("grpc-sidecar", "echo", {"a": [1]}, 60) == {"a": [1]}
    assert await host.call("grpc-sidecar", "echo", b"\xff", 60) == b"\xff"
    assert await host.call("grpc-sidecar", "config", {}, 60) == {"level": 3}
    faults = {
        "hang": "timeout",
        "huge": "flood",
        "crash": "crashed",
        "wrong_id": "bad_frame",
        "malformed": "bad_frame",
        "absent": "unknown_method",
    }
    for method, reason in faults.items():
        with pytest.raises(PluginError) as caught:
            await host.call("grpc-sidecar", method, {}, 1.0)
        assert caught.value.context["reason"] == reason, method
        assert await host.call("grpc-sidecar", "echo", {}, 60) == {}


async def test_what_a_killed_worker_left_is_swept(host: PluginHost, samples: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    left = Path(f"/tmp/rollout-plugin-{gone.pid}-test")
    left.mkdir()
    await host.load(samples / "sidecar")
    assert not left.exists()


async def test_the_socket_is_private(host: PluginHost, samples: Path) -> None:
    before = set(Path("/tmp").glob("rollout-plugin-*"))
    await host.load(samples / "sidecar")
    made = [d for d in set(Path("/tmp").glob("rollout-plugin-*")) - before if (d / "s").exists()]
    mine = [d for d in made if d.stat().st_uid == os.getuid()]
    assert mine
    for directory in mine:
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert stat.S_IMODE((directory / "s").stat().st_mode) == 0o600

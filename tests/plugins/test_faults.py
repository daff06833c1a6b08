"""What a plugin does wrong costs the caller a typed error in bounded time, and the worker nothing."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from rollout.model.errors import ConfigError, NotFoundError, PluginError, StateError
from rollout_worker.hosting.host import PluginHost
from structlog.testing import capture_logs

Make = Callable[..., Path]


async def reason(host: PluginHost, name: str, method: str, payload: dict[str, object] | bytes | None = None) -> str:
    with pytest.raises(PluginError) as caught:
        await host.call(name, method, payload if payload is not None else {}, 1.0)
    assert name in str(caught.value)
    return str(caught.value.context["reason"])


PYTHON = [
    ("hang", {}, "timeout", True),
    ("spin", {}, "timeout", True),
    ("crash", {}, "crashed", True),
    ("leave", {}, "crashed", True),
    ("big", {"size": 2 << 20}, "flood", True),
    ("raises", {}, "plugin_error", False),
    ("not_json", {}, "wrong_type", False),
    ("nan", {}, "wrong_type", False),
    ("absent", {}, "unknown_method", False),
    ("_private", {}, "unknown_method", False),
    ("big", {"length": 1}, "bad_payload", False),
    ("big", {"size": "x" * (2 << 20)}, "too_large", False),
    ("big", {"size": {1, 2}}, "bad_payload", False),
]


@pytest.mark.parametrize(("method", "payload", "expected", "replaced"), PYTHON)
async def test_python(
    host: PluginHost, make: Make, method: str, payload: dict[str, object], expected: str, replaced: bool
) -> None:
    await host.load(make("python"))
    before = await host.call("faulty-python", "pid", {}, 60)
    assert await reason(host, "faulty-python", method, payload) == expected
    after = await host.call("faulty-python", "pid", {}, 60)
    assert (before != after) is replaced
    assert not psutil.pid_exists(before) or not replaced


SIDECAR = [
    ("hang", "timeout"),
    ("malformed", "bad_frame"),
    ("list", "bad_frame"),
    ("wrong_id", "bad_frame"),
    ("no_payload", "bad_frame"),
    ("huge", "flood"),
    ("cut", "crashed"),
    ("crash", "crashed"),
    ("text", "wrong_type"),
    ("error", "plugin_error"),
]


@pytest.mark.parametrize(("method", "expected"), SIDECAR)
async def test_sidecar(host: PluginHost, make: Make, method: str, expected: str) -> None:
    await host.load(make("sidecar", kind="reward"))
    assert await reason(host, "faulty-sidecar", method) == expected
    assert await host.call("faulty-sidecar", "fine", {}, 60) == 1.0


async def test_unsolicited_output_ends_the_process(host: PluginHost, make: Make) -> None:
    await host.load(make("sidecar"))
    before = await host.call("faulty-sidecar", "pid", {}, 60)
    assert await host.call("faulty-sidecar", "unasked", {}, 60) == 1.0
    try:  # it may come while this call waits, or before
        assert await host.call("faulty-sidecar", "pid", {}, 60) != before
    except PluginError as e:
        assert e.context["reason"] == "bad_frame"
    assert await host.call("faulty-sidecar", "pid", {}, 60) != before


CDYLIB = [
    ("hang", "timeout"),
    ("crash", "crashed"),
    ("huge", "too_large"),
    ("null", "wrong_type"),
    ("fails", "plugin_error"),
    ("text", "wrong_type"),
    ("empty", "wrong_type"),
    ("absent", "unknown_method"),
]


@pytest.mark.parametrize(("method", "expected"), CDYLIB)
async def test_cdylib(host: PluginHost, make: Make, method: str, expected: str) -> None:
    await host.load(make("cdylib"))
    assert await reason(host, "faulty-cdylib", method) == expected
    assert await host.call("faulty-cdylib", "freed", {}, 60) in (0, 1)


async def test_cdylib_buffers_are_copied_then_freed(host: PluginHost, make: Make) -> None:
    await host.load(make("cdylib"))
    assert [await host.call("faulty-cdylib", "freed", {}, 60) for _ in range(3)] == [0, 1, 2]
    assert await host.call("faulty-cdylib", "text", b"", 60) == b"not json"
    assert await host.call("faulty-cdylib", "empty", b"", 60) == b""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("-DABI=2",), "cdylib ABI mismatch: got 2, expected 1"),
        (("-DNULL_TABLE",), "returned NULL"),
        (('-DNAME="other"',), "the manifest says name 'faulty-cdylib', the plugin says 'other'"),
    ],
)
async def test_cdylib_that_does_not_fit(host: PluginHost, make: Make, options: tuple[str, ...], words: str) -> None:
    with pytest.raises(PluginError, match=words):
        await host.load(make("cdylib", cc=options))
    assert host.names() == ()


async def test_cdylib_that_is_no_library(host: PluginHost, make: Make) -> None:
    manifest = make("cdylib")
    manifest.with_name("libfaulty.so").write_bytes(b"text")
    with pytest.raises(PluginError, match="not a plugin library"):
        await host.load(manifest)
    manifest.with_name("libfaulty.so").unlink()
    with pytest.raises(ConfigError, match="build it first"):
        await host.load(manifest)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("exits", "exited with 5; it said: no licence found"),
        ("liar", "the plugin says 'liar'"),
        ("unready", "its preflight says: no GPU"),
    ],
)
async def test_sidecar_that_does_not_start(
    host: PluginHost, make: Make, monkeypatch: pytest.MonkeyPatch, how: str, words: str
) -> None:
    monkeypatch.setenv("TEST_SIDECAR", how)
    with pytest.raises(PluginError, match=words):
        await host.load(make("sidecar"))
    assert not [p for p in psutil.Process().children(recursive=True) if "faulty" in " ".join(p.cmdline())]


async def test_sidecar_that_never_listens(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from rollout_worker.hosting.channel import Limits

    monkeypatch.setenv("TEST_SIDECAR", "deaf")
    host = PluginHost(limits=Limits(start_timeout_s=0.3, stop_grace_s=0.1))
    with pytest.raises(PluginError, match="did not listen"):
        await host.load(make("sidecar"))
    await host.close()


async def test_program_that_is_not_there(host: PluginHost, make: Make) -> None:
    manifest = make("sidecar")
    manifest.write_text(manifest.read_text().replace('"python"', '"no-such-program"'))
    with pytest.raises(PluginError, match="no-such-program"):
        await host.load(manifest)


async def test_module_that_raises(host: PluginHost, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_PLUGIN_REFUSES", "1")
    with pytest.raises(PluginError, match=r"RuntimeError: refuses to start \(.*faulty.py:\d+\)"):
        await host.load(make("python"))


async def test_backoff_doubles_and_a_success_resets_it(make: Make) -> None:
    from rollout_worker.hosting.channel import Limits

    now = [100.0]
    limits = Limits(first_backoff_s=10, max_backoff_s=25, stop_grace_s=0.1)
    host = PluginHost(limits=limits, clock=lambda: now[0])
    await host.load(make("python"))
    for delay in (10, 20, 25):
        assert await reason(host, "faulty-python", "leave") == "crashed"
        assert await reason(host, "faulty-python", "pid") == "backoff"
        now[0] += delay - 2
        assert await reason(host, "faulty-python", "pid") == "backoff"
        now[0] += 2
    await host.call("faulty-python", "pid", {}, 60)
    assert await reason(host, "faulty-python", "leave") == "crashed"
    now[0] += 10
    await host.call("faulty-python", "pid", {}, 60)
    await host.close()


async def test_printing_cannot_corrupt_and_is_bounded(host: PluginHost, make: Make) -> None:
    with capture_logs() as logs:
        await host.load(make("python"))
        assert await host.call("faulty-python", "chatter", {"lines": 20_000}, 30) == "done"
        await host.unload("faulty-python")
    lines = [entry for entry in logs if entry["event"] == "plugin_output"]
    assert 0 < len(lines) < 2000
    assert any(entry["event"] == "plugin_output_dropped" for entry in logs)
    assert any(entry["event"] == "plugin_loaded" and entry["mode"] == "python" for entry in logs)


async def test_events_of_faults(host: PluginHost, make: Make) -> None:
    await host.load(make("python"))
    with capture_logs() as logs:
        await reason(host, "faulty-python", "crash")
    event = next(entry for entry in logs if entry["event"] == "plugin_call_error")
    assert (event["plugin"], event["method"], event["reason"]) == ("faulty-python", "crash", "crashed")
    assert "SIGSEGV" in event["error"]
    assert "about to crash" in event["error"]


async def test_a_caller_that_gives_up_leaves_the_plugin_at_work(host: PluginHost, make: Make) -> None:
    await host.load(make("python"))
    before = await host.call("faulty-python", "pid", {}, 60)
    task = asyncio.create_task(host.call("faulty-python", "rest", {"seconds": 0.2}, 60))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await host.call("faulty-python", "pid", {}, 60) == before


async def test_concurrency_is_what_the_manifest_says(host: PluginHost, make: Make) -> None:
    await host.load(make("python", concurrency=8))
    begin = asyncio.get_running_loop().time()
    await asyncio.gather(*[host.call("faulty-python", "rest", {"seconds": 0.4}, 60) for _ in range(8)])
    assert asyncio.get_running_loop().time() - begin < 2.0


async def test_bytes_go_and_come_as_they_are(host: PluginHost, make: Make) -> None:
    await host.load(make("python"))
    assert await host.call("faulty-python", "back", bytes(range(256)), 60) == bytes(range(256))[::-1]


async def test_secrets_stay_in_the_worker(host: PluginHost, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_SECRET_TOKEN", "hush")
    await host.load(make("python"))
    assert await host.call("faulty-python", "secret", {}, 60) is None


async def test_grandchildren_end_with_the_plugin(make: Make) -> None:
    host = PluginHost()
    await host.load(make("python"))
    grandchild = psutil.Process(await host.call("faulty-python", "child", {}, 60))
    await host.close()
    _, alive = psutil.wait_procs([grandchild], timeout=60)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("mode", ["python", "sidecar", "cdylib"])
async def test_plugins_die_with_a_killed_worker(make: Make, mode: str) -> None:
    program = f"""
import asyncio
from rollout_worker.hosting.host import PluginHost
async def main():
    host = PluginHost()
    await host.load({str(make(mode))!r})
    print(host._plugins["faulty-{mode}"].pid, flush=True)
    try:
        await host.call("faulty-{mode}", "hang", {{}}, 1000)
    finally:
        print("not killed")
asyncio.run(main())
"""
    worker = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    assert worker.stdout is not None
    line = b""
    while not line.strip().isdigit():
        line = await worker.stdout.readline()
    plugin = psutil.Process(int(line))
    worker.kill()
    await worker.wait()
    _, alive = await asyncio.to_thread(psutil.wait_procs, [plugin], timeout=60)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


async def test_allowlist_is_refused_where_it_cannot_be_enforced(host: PluginHost, make: Make) -> None:
    with pytest.raises(ConfigError, match=r"network_allowlist = \['example.org'\]"):
        await host.load(make("python", top='network_allowlist = ["example.org"]'))


async def test_pinned_hash(host: PluginHost, make: Make) -> None:
    import hashlib

    digest = hashlib.sha256((Path(__file__).parent / "faulty.py").read_bytes()).hexdigest()
    manifest = make("python", top=f'sha256 = "{digest}"')
    await host.load(manifest)
    await host.unload("faulty-python")
    await host.load(manifest)
    with manifest.with_name("faulty.py").open("a") as file:
        file.write("# changed\n")
    assert await reason(host, "faulty-python", "leave") == "crashed"
    with pytest.raises(ConfigError, match="review the change and pin the new hash"):  # a restart looks again
        await host.call("faulty-python", "pid", {}, 60)
    await host.unload("faulty-python")
    with pytest.raises(ConfigError, match="review the change and pin the new hash"):
        await host.load(manifest)


async def test_names(host: PluginHost, make: Make, tmp_path: Path) -> None:
    manifest = make("python")
    await host.load(manifest)
    await host.load(manifest.parent)  # the same again is nothing
    assert host.names() == ("faulty-python",)
    other = tmp_path / "other"
    other.mkdir()
    (other / "rollout-plugin.toml").write_text(manifest.read_text())
    (other / "faulty.py").write_text("")
    with pytest.raises(StateError, match="is loaded from"):
        await host.load(other)
    with pytest.raises(NotFoundError, match="loaded: faulty-python"):
        await host.call("absent", "x", {}, 1)


async def test_reload(reloading_host: PluginHost, make: Make) -> None:
    manifest = make("python")
    host = reloading_host
    await host.load(manifest)
    under_way = asyncio.create_task(host.call("faulty-python", "rest", {"seconds": 0.3}, 60))
    await asyncio.sleep(0.05)
    with manifest.with_name("faulty.py").open("a") as file:
        file.write("\ndef fresh() -> int:\n    return 1\n")
    with capture_logs() as logs:
        await host.reload("faulty-python", "edited")
    assert [e["reason"] for e in logs if e["event"] == "plugin_reloaded"] == ["edited"]
    assert await host.call("faulty-python", "fresh", {}, 60) == 1
    assert await under_way == 0.3
    manifest.with_name("faulty.py").write_text("syntax error here")
    with pytest.raises(PluginError, match="SyntaxError"):
        await host.reload("faulty-python")
    assert await host.call("faulty-python", "fresh", {}, 60) == 1  # the old one stays


async def test_reload_needs_its_flag_and_no_cdylib(host: PluginHost, reloading_host: PluginHost, make: Make) -> None:
    await host.load(make("python"))
    with pytest.raises(StateError, match="dev_hot_reload = true"):
        await host.reload("faulty-python")
    await reloading_host.load(make("cdylib"))
    with pytest.raises(PluginError, match="cannot be reloaded"):
        await reloading_host.reload("faulty-cdylib")


async def test_nothing_is_left_behind(make: Make) -> None:
    before = {p for p in Path("/tmp").glob("rollout-plugin-*") if p.owner() == Path.home().owner()}
    others = {p.pid for p in psutil.Process(os.getpid()).children(recursive=True)}
    host = PluginHost()
    for mode in ("python", "sidecar", "cdylib"):
        await host.load(make(mode))
    mine = [p for p in psutil.Process(os.getpid()).children(recursive=True) if p.pid not in others]
    assert len(mine) >= 3
    await host.close()
    _, alive = psutil.wait_procs(mine, timeout=60)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
    assert {p for p in Path("/tmp").glob("rollout-plugin-*") if p.owner() == Path.home().owner()} <= before

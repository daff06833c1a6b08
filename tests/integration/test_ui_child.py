"""The live page that a coordinator starts."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx2
import pytest
from coordinator_places import config, free_addr, spawn
from rollout.config.load import load_settings
from rollout.config.settings import CoordinatorSettings
from rollout.model.errors import ConfigError

UI = '[http]\nui = true\nui_listen_addr = "127.0.0.1:0"\n'


async def test_a_page_that_dies_comes_back_and_ends_with_its_coordinator(tmp_path: Path) -> None:
    node = await spawn(config(tmp_path, free_addr(), extra=UI))
    first = await node.event("ui_ready")
    async with httpx2.AsyncClient() as client:
        assert "No runs yet" in (await client.get(first["url"])).text
        os.kill(first["pid"], signal.SIGKILL)
        await node.event("ui_ended")
        node.lines.remove(first)
        second = await node.event("ui_ready")
        assert "leader: 127.0.0.1" in (await client.get(second["url"] + "workers")).text
    assert await node.kill(signal.SIGTERM) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(second["pid"], 0)


async def test_a_page_ends_with_a_coordinator_that_is_killed(tmp_path: Path) -> None:
    node = await spawn(config(tmp_path, free_addr(), extra=UI))
    pid = (await node.event("ui_ready"))["pid"]
    await node.kill()
    async with asyncio.timeout(20):
        while True:
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                break
            await asyncio.sleep(0.1)


async def test_a_page_that_cannot_listen_costs_the_coordinator_nothing(tmp_path: Path) -> None:
    taken = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    place = f"127.0.0.1:{taken.sockets[0].getsockname()[1]}"
    node = await spawn(config(tmp_path, free_addr(), extra=UI.replace("127.0.0.1:0", place)))
    assert place in (await node.event("ui_ended"))["reason"]
    await node.event("coordinator_ready")
    assert await node.kill(signal.SIGTERM) == 0
    taken.close()
    await taken.wait_closed()


@pytest.mark.parametrize(
    ("extra", "place"),
    [
        ('ui_listen_addr = "0.0.0.0:8265"', "transport.join_addr"),
        ('ui_prefix = "/rollout"', "transport.join_addr"),
        ('ui_listen_addr = "x"', "http.ui_listen_addr"),
        ('ui_prefix = "rollout"', "http.ui_prefix"),
        ('ui_key = "k.pem"', "http.ui_certificate"),
    ],
)
def test_a_page_that_is_not_safe_is_refused(tmp_path: Path, extra: str, place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(CoordinatorSettings, config(tmp_path, free_addr(), extra=f"[http]\nui = true\n{extra}\n"))
    assert place in str(caught.value)

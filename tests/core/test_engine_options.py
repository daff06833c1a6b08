"""Arguments of the engine: those that this vLLM does not have are found without importing it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from rollout.model.errors import AttemptError, ConfigError
from rollout.workloads.engine_options import installed_vllm_options
from rollout.workloads.infer.engine_checks import check_options
from rollout.workloads.sections import BackendSection
from rollout_worker.backends.environment import engine_devices
from rollout_worker.backends.port import BackendOptions
from rollout_worker.backends.vllm import VllmBackend

SOURCE = """
raise RuntimeError("imported")

class EngineArgs:
    block_size: int = 1
    quantization: str | None = None

    def helper(self):
        local: int = 0

class AsyncEngineArgs(EngineArgs):
    enable_log_requests: bool = False
"""


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    source = tmp_path / "vllm" / "engine" / "arg_utils.py"
    source.parent.mkdir(parents=True)
    source.write_text(SOURCE)
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(str(tmp_path))
    return source


def backend(**engine: object) -> BackendSection:
    return BackendSection(kind="vllm", engine=engine)


def test_typing_errors_are_all_told_with_the_nearest_name(vllm: Path) -> None:
    with pytest.raises(ConfigError) as error:
        check_options(backend(quantisation="fp8", blocksize=16, enable_log_requests=True), "backend.engine")
    first, second = error.value.message.splitlines()[1:]
    assert "backend.engine.quantisation" in first and "quantization" in first.partition(":")[2]
    assert "backend.engine.blocksize" in second and "block_size" in second.partition(":")[2]


def test_a_vllm_whose_arguments_cannot_be_read_refuses_none(vllm: Path) -> None:
    vllm.unlink()
    assert installed_vllm_options() == frozenset()
    check_options(backend(quantisation="fp8"), "backend.engine")


@dataclass
class Arguments:
    model: str = ""
    block_size: int = 0
    max_loras: int = 0
    max_lora_rank: int = 0


def options(**engine: object) -> BackendOptions:
    return BackendOptions("m", kind="vllm", options={"engine": engine})


def test_a_worker_whose_vllm_lacks_arguments_names_them_all() -> None:
    with pytest.raises(AttemptError) as error:
        VllmBackend(options(blocksize=16, quantization="fp8"))._arguments(Arguments, {})
    assert not error.value.retry
    assert "backend.engine.blocksize" in error.value.message and "backend.engine.quantization" in error.value.message


def test_room_is_made_for_the_adapter_of_the_highest_rank(tmp_path: Path) -> None:
    for name, text in (("a", '{"r": 4}'), ("b", '{"r": 8, "rank_pattern": {"q_proj": 20}}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(text)
    adapters = {name: str(tmp_path / name) for name in ("a", "b")}
    found = VllmBackend(options(block_size=16))._arguments(Arguments, adapters)
    assert found == {"model": "m", "block_size": 16, "max_loras": 2, "max_lora_rank": 32}
    assert VllmBackend(options(max_lora_rank=64))._arguments(Arguments, adapters)["max_lora_rank"] == 64
    (tmp_path / "a" / "adapter_config.json").write_text("{}")
    with pytest.raises(AttemptError, match="is no LoRA adapter"):
        VllmBackend(options())._arguments(Arguments, adapters)


def test_an_engine_leases_as_many_devices_as_it_spreads_over() -> None:
    spread = {"kind": "vllm", "tensor_parallel_size": 2, "engine": {"pipeline_parallel_size": 2}}
    assert engine_devices(spread) == 4 and engine_devices({**spread, "device": "cpu"}) == 0

"""Arguments of the engine: those that this vLLM does not have are found without importing it."""

from __future__ import annotations

from pathlib import Path

import pytest
from rollout.model.errors import ConfigError
from rollout.workloads.engine_options import installed_vllm_options
from rollout.workloads.infer.workload import check_options
from rollout.workloads.sections import BackendSection

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

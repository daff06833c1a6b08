"""The configuration of `infer batch`: every key is described, contradictions are refused with what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from rollout.model.errors import ConfigError
from rollout.workloads.infer.config import InferConfig, load_schema


def config(**sections: Any) -> InferConfig:
    base = {"model": {"uri": "m"}, "input": {"glob": "x"}, "output": {"dir": "o"}}
    return InferConfig.model_validate({**base, **sections})


def test_every_key_has_a_description() -> None:
    for section in InferConfig.model_fields.values():
        kind = section.annotation
        assert isinstance(kind, type) and issubclass(kind, BaseModel)
        for name, field in kind.model_fields.items():
            assert field.description, f"{kind.__name__}.{name}"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"sampling": {"max_tokens": 0}}, "greater than or equal to 1"),
        ({"sampling": {"stream": True}}, "False"),
        ({"sampling": {"temprature": 1}}, "Extra inputs"),
        ({"sampling": {"min_tokens": 9, "max_tokens": 8}}, "min_tokens (9) is larger"),
        ({"sampling": {"stop": [""]}}, "empty string"),
        ({"workers": {"count": 0}}, "greater than or equal to 1"),
        ({"input": {"glob": []}}, "at least one file"),
        ({"input": {"glob": "x", "columns": "q=prompt,n"}}, "input.columns"),
        ({"input": {"glob": "x", "columns": "q=prompt,q=id"}}, "names a column twice"),
        ({"backend": {"kind": "mock", "tool_parser": "hermes"}}, 'backend.kind = "vllm"'),
        ({"backend": {"kind": "mock", "tensor_parallel_size": 2}}, 'backend.kind = "vllm"'),
        ({"backend": {"kind": "vllm", "device": "cpu", "tensor_parallel_size": 2}}, "needs GPUs"),
        (
            {"backend": {"kind": "openai", "base_url": "http://h/v1", "prices": {"x": {"input": 1, "output": 1}}}},
            "no price of",
        ),
        ({"backend": {"kind": "openai", "base_url": "http://h/v1", "prices": {"m": {"input": 1}}}}, "output"),
        ({"backend": {"kind": "openai", "base_url": "ftp://h"}}, "no http"),
        ({"backend": {"kind": "openai"}}, "needs the address"),
        ({"backend": {"kind": "mock", "requests_per_minute": 5}}, 'needs backend.kind = "openai"'),
        ({"backend": {"kind": "vllm", "engine": {"max_model_len": 9}}}, "set backend.max_model_len"),
        ({"backend": {"kind": "vllm", "engine": {"data_parallel_size": 2}}}, "leased by its worker"),
        ({"backend": {"kind": "vllm", "engine": {"hf_token": "t"}}}, "holds no secret"),
        ({"backend": {"kind": "transformers", "engine": {"device_map": "auto"}}}, "set backend.device"),
        ({"backend": {"kind": "mock", "engine": {"runner": "pooling"}}}, "takes no such arguments"),
        ({"backend": {"kind": "vllm", "engine": {"enable_lora": True}}}, "set model.lora"),
        (
            {"model": {"uri": "m", "lora": "a"}, "backend": {"kind": "openai", "base_url": "http://h/v1"}},
            'needs backend.kind = "vllm"',
        ),
        ({"model": {"uri": "m", "loras": {"a": "snapshot:ab"}}}, "rollout snapshot export"),
        ({"backend": {"kind": "openai", "base_url": "http://h/v1", "replicas": 2}}, "max_in_flight"),
        ({"backend": {"kind": "mock", "replicas": "all"}}, "auto"),
        ({"backend": {"max_model_len": 64}, "sampling": {"max_tokens": 64}}, "leaves no room"),
    ],
)
def test_refuses(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as error:
        config(**sections)
    assert message in str(error.value)


def test_forms() -> None:
    assert config(sampling={"stop": "END", "top_k": 0}).sampling.stop == ["END"]
    assert config(sampling={"top_k": 0}).sampling.top_k == -1
    assert config(input={"glob": ["a", "b"]}).input.patterns == ["a", "b"]
    assert config(input={"glob": "a", "columns": "q=prompt,n=id"}).input.columns == {"q": "prompt", "n": "id"}
    assert config().backend.concurrency == 64


def test_schema_file(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"type": "object"}))
    assert load_schema(str(path)) == {"type": "object"}
    path.write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        load_schema(str(path))
    with pytest.raises(ConfigError, match="cannot read"):
        load_schema(str(tmp_path / "none"))

"""`[backend] engine`: arguments that are passed to an engine unchanged, and those that cannot be."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

_DEVICES = "the devices of an engine are leased by its worker"
_SAMPLING = "rows are sampled as [sampling] and they say"
_SHAPE = {
    "dtype": "set backend.dtype",
    "revision": "set model.revision",
    "trust_remote_code": "set backend.trust_remote_code",
}
_REFUSED = MappingProxyType(
    {
        "vllm": {
            **_SHAPE,
            "model": "set model.uri",
            "model_weights": "set model.uri",
            "tokenizer": "set model.tokenizer",
            "tokenizer_revision": "set model.tokenizer to a directory",
            **dict.fromkeys(("enable_lora", "lora_modules", "default_mm_loras"), "set model.lora or [model.loras]"),
            "skip_tokenizer_init": "stop strings and texts need the tokenizer",
            "device": "set backend.device",
            **dict.fromkeys(("device_ids", "distributed_executor_backend"), _DEVICES),
            "max_model_len": "set backend.max_model_len",
            "max_num_seqs": "set backend.max_num_seqs",
            "gpu_memory_utilization": "set backend.gpu_memory_utilization",
            "enforce_eager": "set backend.enforce_eager",
            "tensor_parallel_size": "set backend.tensor_parallel_size",
            **dict.fromkeys(("nnodes", "node_rank", "master_addr", "master_port"), _DEVICES + ", all on one host"),
            "enable_prompt_embeds": "rows are texts and token ids",
            "max_logprobs": "rows may ask for 20",
            "generation_config": _SAMPLING,
            "override_generation_config": _SAMPLING,
            "logits_processors": _SAMPLING,
            "worker_extension_cls": "it is this product's",
            "worker_cls": "it is this product's",
            "hf_token": "put HF_TOKEN into the environment of the worker: a configuration holds no secret",
        },
        "transformers": {
            **_SHAPE,
            "torch_dtype": "set backend.dtype",
            "device_map": "set backend.device",
            "token": "put HF_TOKEN into the environment of the worker: a configuration holds no secret",
        },
        "mock": {},
        "openai": {},
    }
)
_NO_ARGUMENTS = ("mock", "openai")
_PARALLEL = "data_parallel_"


def refused_options(kind: str, given: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (argument, why it is not passed) for those `given` to a backend of that kind."""
    for name in given:
        if kind in _NO_ARGUMENTS:
            yield name, f'backend "{kind}" takes no such arguments: remove it'
        elif why := _REFUSED.get(kind, {}).get(name):
            yield name, f"cannot be set here: {why}"
        elif kind == "vllm" and name.startswith(_PARALLEL):
            yield name, f"cannot be set here: {_DEVICES}, and each engine has a copy of the model"


def unknown_options(given: Iterable[str], known: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield (argument, likely correction) for those `given` that this vLLM, with the `known` ones, does not have."""
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            yield name, "is no argument of this vLLM" + (f": did you mean {near[0]}?" if near else "")


def installed_vllm_options() -> frozenset[str]:
    """Return the arguments of the installed vLLM, from its source, since importing it takes seconds; empty if
    unknown."""
    found = find_spec("vllm")
    if found is None or found.origin is None:
        return frozenset()
    try:
        tree = ast.parse((Path(found.origin).parent / "engine" / "arg_utils.py").read_text("utf-8"))
    except (OSError, SyntaxError):
        return frozenset()
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return frozenset(
        line.target.id
        for found in classes
        if found.name in ("EngineArgs", "AsyncEngineArgs")
        for line in found.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    )

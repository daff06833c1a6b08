"""Loads new weights into a running vLLM, as a worker extension that each of its worker processes has."""

# The engine's own types are incomplete or, where it is not installed, absent.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


class PolicyWeights:
    model_runner: Any
    vllm_config: Any

    def load_policy_weights(self, files: dict[str, list[str]]) -> None:
        """Load the model's own files again, replacing the tensors in `files` (safetensors file -> names).

        All tensors are loaded: vLLM joins some, and some of its kernels pack them, so a part cannot be replaced alone.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader import get_model_loader

        config, runner = self.vllm_config, self.model_runner
        loader: Any = get_model_loader(config.load_config)
        with set_current_vllm_config(config):
            own = loader.get_all_weights(config.model_config, runner.get_model())
            runner.reload_weights(weights_iterator=replaced(own, files))
            _process_tied(runner.get_model())


def _process_tied(model: Any) -> None:
    """Process an output layer tied to the embeddings. It was not loaded itself, so what it keeps besides the weights
    (packed ones, on a CPU) is outdated."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    layers: list[Any] = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
    heads = [layer for layer in layers if isinstance(layer, ParallelLMHead)]
    embeddings = {layer.weight.data_ptr() for layer in layers if layer not in heads}
    for head in heads:
        if head.weight.data_ptr() in embeddings:
            head.quant_method.process_weights_after_loading(head)


def replaced(weights: Iterable[tuple[str, Any]], files: dict[str, list[str]]) -> Iterator[tuple[str, Any]]:
    """Yield `weights` with the tensors of `files`. Raises ValueError if none has the same name and shape."""
    from safetensors import safe_open

    opened = {path: safe_open(path, framework="pt") for path in files}
    places = {name: path for path, names in files.items() for name in names}
    for name, tensor in weights:
        if (path := places.pop(name, None)) is None:
            yield name, tensor
            continue
        given: Any = opened[path].get_tensor(name)
        if given.shape != tensor.shape:
            raise ValueError(f"the new weights have another shape of {name}")
        yield name, given
    if places:
        raise ValueError(f"the model's files have no tensor {min(places)}")

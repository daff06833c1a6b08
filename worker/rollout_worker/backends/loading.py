"""Explains why a model cannot be loaded: early, in one sentence, with the remedy.

The hub's client and the engines retry for minutes and end with a traceback, although the cause is known before.
"""

# Where no engine is installed its libraries are absent, and their types are incomplete.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from rollout.model.errors import AttemptError

ASK_S = 10.0
"""Time limit for asking the hub whether it has a model."""
TEXT_MAX = 600
_PYDANTIC = re.compile(r" \[type=\w+, input_value=.*", re.DOTALL)
"""What Pydantic appends to a fault of a configuration: pages of values."""
_NO_MEMORY = ("out of memory", "free memory on device", "no available memory for the cache", "insufficient memory")
"""Messages of engines, in lower case, about too little device memory, which another run's engine may hold."""


def find_on_hub(name: str, revision: str | None) -> None:
    """Raise AttemptError if `name` is not a directory, not in this host's cache, and not available from the hub. Blocks
    for at most `ASK_S`."""
    if Path(name).is_dir() or os.environ.get("VLLM_USE_MODELSCOPE"):
        return
    if name.startswith(("/", "./", "../", "~")) or name.count("/") > 1:
        raise AttemptError(
            f"the model {name} is no directory on this worker and no name of the hub: correct [model] uri",
            code="model_missing",
            retry=False,
        )
    try:
        from huggingface_hub import HfApi, constants, try_to_load_from_cache
        from huggingface_hub.utils import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
    except ImportError:
        return  # whoever loads it says what is missing
    if isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
        return
    hub = urlsplit(constants.ENDPOINT).hostname or constants.ENDPOINT
    absent = f"the model {name} is not on this worker"
    if constants.HF_HUB_OFFLINE:
        raise AttemptError(
            f"{absent}, and HF_HUB_OFFLINE=1 forbids to load it from {hub}: name a directory in [model] uri, or start "
            "the worker without HF_HUB_OFFLINE",
            code="model_missing",
            retry=False,
        )
    token = "HF_TOKEN in the worker's environment"
    try:
        HfApi().model_info(name, revision=revision, timeout=ASK_S)
    except GatedRepoError as error:
        message = f"{absent}, and {hub} gives it only to those who have accepted its terms: do so, and put {token}"
        raise AttemptError(message, code="model_missing", retry=False) from error
    except RevisionNotFoundError as error:
        message = f"{hub} has no revision {revision!r} of the model {name}: correct [model] revision"
        raise AttemptError(message, code="model_missing", retry=False) from error
    except RepositoryNotFoundError as error:
        message = f"{absent}, and {hub} has none of that name, or it is private: correct [model] uri, or put {token}"
        raise AttemptError(message, code="model_missing", retry=False) from error
    except Exception as error:  # the HTTP library beneath, and with it its errors, differs by version
        raise AttemptError(
            f"{absent}, and {hub} cannot be reached ({brief(error) or type(error).__name__}): name a directory in "
            "[model] uri, set HF_ENDPOINT to a mirror, or let the worker reach it",
            code="model_unreachable",
        ) from error


def load_failure(what: str, error: BaseException) -> AttemptError:
    """Return the error of an engine that refused. `what` failed: `the model x cannot be loaded`."""
    text = brief(error) or type(error).__name__
    if any(words in text.lower() for words in _NO_MEMORY) or type(error).__name__ == "OutOfMemoryError":
        return AttemptError(
            f"{what}: {text}: free the device, or lower backend.gpu_memory_utilization, max_model_len or max_num_seqs",
            code="out_of_device_memory",
        )
    return AttemptError(f"{what}: {text}", code="model_load_failed", retry=False)


def other_model(name: str) -> AttemptError:
    """Return the error for new weights that the model cannot take."""
    message = f"the weights are of another model: this one has no tensor {name} of that shape"
    return AttemptError(message, code="weights_invalid", retry=False)


def brief(error: BaseException) -> str:
    """Return an error's message without the pages that some libraries append."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = _PYDANTIC.sub("", " ".join(lines[:6]))
    return text if len(text) <= TEXT_MAX else text[: TEXT_MAX - 1] + "…"

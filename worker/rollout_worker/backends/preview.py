"""Counts the tokens of prompts without an engine: `python -m rollout_worker.backends.preview`.

The first line of standard input names the tokenizer: {"tokenizer", "revision", "model", "trust_remote_code",
"max_model_len"}; the answer is {"limit"}, the model's context in tokens (null if unknown), or {"error"}. Each further
line is a prompt, {"prompt" | "ids" | "messages" with "template", "show", "at"}. The answer is {"at", "tokens"}, with
"text" if it is to be shown, or {"at", "code", "error"} if there can be no prompt.
"""

# The engine's own types are incomplete or, where it is not installed, absent.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import json
import sys
from typing import Any

from rollout.model.errors import AttemptError

from rollout_worker.backends.port import Request, Sampling
from rollout_worker.backends.tokens import TextCodec
from rollout_worker.backends.transformers import model_length

_NO_LIMIT = 1 << 62
_SAMPLING = Sampling()


def opened(asked: dict[str, Any]) -> tuple[TextCodec, int | None]:
    """Return the tokenizer and the model's context. Raises OSError, ValueError or AttemptError if it is unavailable."""
    remote = bool(asked["trust_remote_code"])
    codec = TextCodec.load(
        asked["tokenizer"], revision=asked["revision"], trust_remote_code=remote, max_model_len=_NO_LIMIT
    )
    wanted: int | None = asked["max_model_len"]
    if asked["model"] is None:
        return codec, wanted
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(asked["model"], revision=asked["revision"], trust_remote_code=remote)
    return codec, model_length(config, wanted)


def counted(codec: TextCodec, prompt: dict[str, Any]) -> dict[str, Any]:
    messages, ids = prompt.get("messages"), prompt.get("ids")
    request = Request(
        request_id="",
        sampling=_SAMPLING,
        prompt=prompt.get("prompt"),
        messages=tuple(messages) if messages is not None else None,
        template=prompt.get("template", {}),
        prompt_ids=tuple(ids) if ids is not None else None,
    )
    try:
        found = codec.encode(request)
    except AttemptError as error:
        return {"at": prompt["at"], "code": error.error_code, "error": error.message}
    answer = {"at": prompt["at"], "tokens": len(found)}
    if prompt["show"]:
        answer["text"] = codec.tokenizer.decode(found, skip_special_tokens=False)
    return answer


def main() -> None:
    answers = sys.stdout
    sys.stdout = sys.stderr  # libraries may print
    try:
        codec, limit = opened(json.loads(sys.stdin.readline()))
    except (OSError, ValueError, AttemptError, ImportError) as error:
        first = str(error).strip().partition("\n")[0]
        answers.write(json.dumps({"error": first or type(error).__name__}) + "\n")
        return
    answers.write(json.dumps({"limit": limit}) + "\n")
    answers.flush()
    for line in sys.stdin:
        answers.write(json.dumps(counted(codec, json.loads(line))) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()

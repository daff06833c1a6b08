"""Lines of `openai.jsonl`: the output format of OpenAI's batch interface."""

from __future__ import annotations

from typing import Any

from rollout.workloads.commit import CommitEntry
from rollout.workloads.infer.payload import ChoiceResult, RowResult, encode_vector
from rollout.workloads.infer.request import RowRequest
from rollout.workloads.json_form import JsonObject


def openai_line(
    identity: Any, request: RowRequest, result: RowResult, entry: CommitEntry, model: JsonObject
) -> JsonObject:
    if request.embeds:
        return _answered(identity, entry, _embeddings(request, result, model))
    completion_tokens = sum(choice.tokens for choice in result.choices)
    chat = request.chats
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{entry.id.hex()[:32]}",
        "object": "chat.completion" if chat else "text_completion",
        "created": entry.accepted_ms // 1000,
        "model": model["uri"],
        "choices": [_choice(index, choice, chat) for index, choice in enumerate(result.choices)],
        "usage": {
            "prompt_tokens": result.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": result.prompt_tokens + completion_tokens,
        },
    }
    return _answered(identity, entry, body)


def shown_vectors(request: RowRequest, result: RowResult) -> list[Any]:
    """Return the vectors in the form that the row asks for."""
    vectors = result.embeddings or ()
    return [encode_vector(vector) if request.base64 else list(vector) for vector in vectors]


def _embeddings(request: RowRequest, result: RowResult, model: JsonObject) -> JsonObject:
    vectors = shown_vectors(request, result)
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": at, "embedding": vector} for at, vector in enumerate(vectors)],
        "model": model["uri"],
        "usage": {"prompt_tokens": result.prompt_tokens, "total_tokens": result.prompt_tokens},
    }


def _answered(identity: Any, entry: CommitEntry, body: JsonObject) -> JsonObject:
    request_id = entry.id.hex()
    return {
        "id": f"batch_req_{request_id[:32]}",
        "custom_id": str(identity),
        "response": {"status_code": 200, "request_id": request_id, "body": body},
        "error": None,
    }


def openai_error(identity: Any, code: str, message: str, entry: CommitEntry) -> JsonObject:
    return {
        "id": f"batch_req_{entry.id.hex()[:32]}",
        "custom_id": str(identity),
        "response": None,
        "error": {"code": code, "message": message},
    }


def _choice(index: int, choice: ChoiceResult, chat: bool) -> JsonObject:
    out: JsonObject = {"index": index, "finish_reason": choice.finish_reason, "logprobs": None}
    if chat:
        content = None if choice.tool_calls and not choice.text else choice.text
        message: JsonObject = {"role": "assistant", "content": content}
        # As vLLM's server names it; OpenAI's has no such field.
        parted = {"tool_calls": choice.tool_calls, "reasoning_content": choice.reasoning, "refusal": choice.refusal}
        out["message"] = message | {key: value for key, value in parted.items() if value is not None}
        if choice.logprobs is not None:
            content = [
                {"token": t["token"], "logprob": t["logprob"], "top_logprobs": t["top"]} for t in choice.logprobs
            ]
            out["logprobs"] = {"content": content}
        return out
    out["text"] = choice.text
    if choice.logprobs is not None:
        out["logprobs"] = {
            "tokens": [t["token"] for t in choice.logprobs],
            "token_logprobs": [t["logprob"] for t in choice.logprobs],
            "top_logprobs": [{top["token"]: top["logprob"] for top in t["top"]} for t in choice.logprobs],
        }
    return out

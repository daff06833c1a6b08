"""What coding command lines print, cut to what is read of it. Recorded from the programs, which asked a service that
answers "done"; goose's and openhands's are written by hand after their formats."""

from __future__ import annotations

import json
from typing import Any

CLAUDE_MESSAGE = {
    "type": "assistant",
    "message": {
        "id": "msg_1", "type": "message", "role": "assistant", "model": "claude-sonnet-4-5",
        "content": [{"type": "text", "text": "done"}], "stop_reason": None,
        "usage": {
            "input_tokens": 11, "cache_creation_input_tokens": 3, "cache_read_input_tokens": 4, "output_tokens": 1,
        },
    },
}  # fmt: skip
CLAUDE_RESULT = {
    "type": "result", "subtype": "success", "is_error": False, "num_turns": 1, "result": "done",
    "total_cost_usd": 0.00015045,
    "usage": {"input_tokens": 11, "cache_creation_input_tokens": 3, "cache_read_input_tokens": 4, "output_tokens": 7},
    "modelUsage": {
        "claude-sonnet-4-5": {
            "inputTokens": 11, "outputTokens": 7, "cacheReadInputTokens": 4, "cacheCreationInputTokens": 3,
            "webSearchRequests": 0, "costUSD": 0.00015045, "contextWindow": 200000,
        }
    },
}  # fmt: skip
CODEX_RETRIED = {
    "type": "error",
    "message": "Reconnecting... 2/5 (unexpected status 401 Unauthorized: Invalid API key)",
}
CODEX_USAGE = {
    "type": "turn.completed",
    "usage": {
        "input_tokens": 21, "cached_input_tokens": 6, "cache_write_input_tokens": 0, "output_tokens": 9,
        "reasoning_output_tokens": 2,
    },
}  # fmt: skip
CODEX_FAILED = {
    "type": "turn.failed",
    "error": {"message": "unexpected status 401 Unauthorized: Invalid API key, url: http://x/v1/responses"},
}
GEMINI_STATS = {"total_tokens": 56, "input_tokens": 41, "output_tokens": 10, "cached": 13, "input": 28}
GEMINI_RESULT = {
    "type": "result", "status": "success",
    "stats": {**GEMINI_STATS, "duration_ms": 723, "tool_calls": 0, "models": {"gemini-x": GEMINI_STATS}},
}  # fmt: skip
GEMINI_FAILED = {
    "type": "result", "status": "error",
    "error": {"type": "unknown", "message": "[API Error: {\"error\":{\"message\":\"Invalid API key\"}}]"},
    "stats": {"total_tokens": 0, "input_tokens": 0, "output_tokens": 0, "cached": 0},
}  # fmt: skip
QWEN_MESSAGE = {
    "type": "assistant",
    "message": {
        "id": "a1", "role": "assistant", "content": [{"type": "text", "text": "done"}],
        "usage": {"input_tokens": 31, "output_tokens": 8, "cache_read_input_tokens": 12, "total_tokens": 39},
    },
}  # fmt: skip
QWEN_RESULT = {
    "type": "result", "subtype": "success", "is_error": False, "num_turns": 1, "result": "done",
    "usage": {"input_tokens": 62, "output_tokens": 16, "cache_read_input_tokens": 24, "total_tokens": 78},
}  # fmt: skip
QWEN_FAILED = {
    "type": "result", "subtype": "error_during_execution", "is_error": True,
    "usage": {"input_tokens": 0, "output_tokens": 0}, "error": {"message": "[API Error: 401 Invalid API key]"},
}  # fmt: skip
OPENCODE_STEP = {
    "type": "step_finish", "timestamp": 1795793695323, "sessionID": "ses_1",
    "part": {
        "type": "step-finish", "reason": "stop", "cost": 0,
        "tokens": {"total": 39, "input": 19, "output": 8, "reasoning": 0, "cache": {"write": 0, "read": 12}},
    },
}  # fmt: skip
OPENCODE_FAILED = {
    "type": "error", "sessionID": "ses_1",
    "error": {"name": "APIError", "data": {"message": "Invalid API key", "statusCode": 401, "isRetryable": False}},
}  # fmt: skip
AIDER = """Aider v0.86.2
Model: openai/gpt-x with whole edit format
Git repo: .git with 0 files

done

Tokens: 31 sent, 8 received.
Tokens: 2.5k sent, 1.1k cache hit, 300 received.
Cost: $0.0045 message, $0.01 session.
"""
AIDER_FAILED = "litellm.AuthenticationError: AuthenticationError: OpenAIException - Incorrect API key provided\n"
GOOSE = {
    "type": "complete", "total_tokens": 60, "input_tokens": 50, "output_tokens": 10, "cache_read_input_tokens": 20,
    "cost_usd": 0.002,
}  # fmt: skip
GOOSE_OLD = {"type": "complete", "total_tokens": 60}
MINI = {
    "info": {"model_stats": {"instance_cost": 0.5, "api_calls": 1}, "exit_status": "Submitted", "submission": ""},
    "messages": [
        {"role": "system", "content": "x"},
        {
            "role": "assistant",
            "content": "done",
            "extra": {
                "response": {
                    "usage": {
                        "prompt_tokens": 31, "completion_tokens": 8, "prompt_tokens_details": {"cached_tokens": 12},
                    }
                }
            },
        },
    ],
}  # fmt: skip
OPENHANDS = {
    "kind": "ConversationStateUpdateEvent", "key": "stats",
    "value": {
        "usage_to_metrics": {
            "agent": {
                "accumulated_cost": 0.25,
                "accumulated_token_usage": {"prompt_tokens": 31, "completion_tokens": 8, "cache_read_tokens": 12},
            }
        }
    },
}  # fmt: skip


def lines(*events: Any) -> str:
    """As they print them: an object a line, and what is none in between."""
    return "a warning\n{not json\n" + "".join(json.dumps(event) + "\n" for event in events)

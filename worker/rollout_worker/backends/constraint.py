"""Structured output for engines that have none of their own: JSON schema over llguidance."""

from __future__ import annotations

import json
from typing import Any

from rollout.model.errors import AttemptError


class ConstraintFactory:
    """Compiles schemas once per engine. Not for use by several threads at once."""

    def __init__(self, tokenizer: Any, vocabulary: int, eos: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._eos = eos
        self._llg: Any = None
        self._grammars: dict[str, str] = {}

    def make(self, schema: dict[str, Any]) -> Constraint:
        """AttemptError (not retryable) when the schema is not usable, or llguidance is missing."""
        llguidance = self._library()
        key = json.dumps(schema, sort_keys=True)
        grammar = self._grammars.get(key)
        if grammar is None:
            options = {"whitespace_flexible": False}
            try:
                grammar = str(llguidance.LLMatcher.grammar_from_json_schema(key, overrides=options))
            except ValueError as error:
                raise _bad_schema(error) from error
            self._grammars[key] = grammar
        matcher = llguidance.LLMatcher(self._llg, grammar)
        if matcher.is_error():
            raise _bad_schema(matcher.get_error())
        return Constraint(matcher, self._vocabulary)

    def _library(self) -> Any:
        try:
            import llguidance
            import llguidance.hf
        except ImportError as error:
            raise AttemptError(
                "a JSON schema needs llguidance here: pip install 'rollout-engine[transformers]'",
                code="bad_request",
                retry=False,
            ) from error
        if self._llg is None:
            self._llg = llguidance.hf.from_tokenizer(self._tokenizer, n_vocab=self._vocabulary, eos_token=self._eos)
        return llguidance


class Constraint:
    """What may come next of one completion."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    def mask(self, scores_V: Any) -> None:
        import torch

        words = torch.zeros((self._vocabulary + 31) // 32, dtype=torch.int32)
        self._matcher.unsafe_compute_mask_ptr(words.data_ptr(), words.numel() * words.element_size())
        allowed = ((words[:, None] >> torch.arange(32, dtype=torch.int32)) & 1).bool().flatten()[: self._vocabulary]
        scores_V[: self._vocabulary].masked_fill_(~allowed.to(scores_V.device), float("-inf"))
        scores_V[self._vocabulary :] = float("-inf")

    def accept(self, token: int) -> bool:
        """Whether the completion is complete with `token`."""
        self._matcher.consume_token(token)
        if self._matcher.is_error():
            raise AttemptError(f"structured output failed: {self._matcher.get_error()}", code="structured_output")
        return bool(self._matcher.is_stopped())


def _bad_schema(error: object) -> AttemptError:
    return AttemptError(f"json_schema is not usable: {error}", code="bad_request", retry=False)

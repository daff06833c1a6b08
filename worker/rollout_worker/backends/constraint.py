"""Structured output, with llguidance, for engines without their own."""

from __future__ import annotations

import json
from typing import Any

from rollout.model.errors import AttemptError


class ConstraintFactory:
    """Compiles each constraint once per engine. Not thread-safe."""

    def __init__(self, tokenizer: Any, vocabulary: int, eos: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._eos = eos
        self._llg: Any = None
        self._grammars: dict[tuple[str, str], str] = {}

    def make(self, kind: str, value: Any) -> Constraint:
        """Return the constraint of a `Sampling.structure`. Raises AttemptError (not retryable) if it is unusable, or if
        llguidance is missing."""
        llguidance = self._library()
        text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
        grammar = self._grammars.get((kind, text))
        if grammar is None:
            try:
                if kind == "json":
                    options = {"whitespace_flexible": False}
                    grammar = str(llguidance.LLMatcher.grammar_from_json_schema(text, overrides=options))
                else:
                    grammar = str(llguidance.grammar_from(kind, text))
            except ValueError as error:
                raise _unusable(kind, error) from error
            self._grammars[kind, text] = grammar
        matcher = llguidance.LLMatcher(self._llg, grammar)
        if matcher.is_error():
            raise _unusable(kind, matcher.get_error())
        return Constraint(matcher, self._vocabulary)

    def _library(self) -> Any:
        try:
            import llguidance
            import llguidance.hf
        except ImportError as error:
            raise AttemptError(
                "structured output needs llguidance here: pip install 'rollout-engine[transformers]'",
                code="bad_request",
                retry=False,
            ) from error
        if self._llg is None:
            self._llg = llguidance.hf.from_tokenizer(self._tokenizer, n_vocab=self._vocabulary, eos_token=self._eos)
        return llguidance


class Constraint:
    """The tokens that may come next in one completion."""

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
        """Accept a token, and return whether it completes the completion."""
        self._matcher.consume_token(token)
        if self._matcher.is_error():
            raise AttemptError(f"structured output failed: {self._matcher.get_error()}", code="structured_output")
        return bool(self._matcher.is_stopped())


def _unusable(kind: str, error: object) -> AttemptError:
    name = "json_schema" if kind == "json" else kind
    return AttemptError(f"{name} is not usable: {error}", code="bad_request", retry=False)

"""Images of chats, for engines that run their model here: which models support them, and how they read them."""

# The engine's own types are incomplete or, where it is not installed, absent.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

import base64
import io
import re
from dataclasses import replace
from typing import Any, cast

from rollout.model.errors import AttemptError
from rollout.workloads.infer.images import image_urls, is_data

from rollout_worker.backends.port import Request
from rollout_worker.backends.tokens import TextCodec

_LOOPS = re.compile(r"for\s+\w+\s+in\s+\w+(?:\[\s*['\"]content['\"]\s*\]|\.content)")
"""Matches a chat template that reads content as parts."""


def has_images(request: Request) -> bool:
    return bool(image_urls(request.messages))


def no_images(model: str) -> AttemptError:
    return AttemptError(f"the model {model} takes no images", code="bad_request", retry=False)


class Vision:
    """The processor of a model that supports images. `text` is the prompt with a placeholder for each."""

    def __init__(self, processor: Any, codec: TextCodec) -> None:
        self.processor = processor
        self._codec = codec
        if not codec.tokenizer.chat_template:  # of older models, whose processor has its own file for it
            codec.tokenizer.chat_template = getattr(processor, "chat_template", None)
        template = codec.tokenizer.chat_template
        self._by_parts = isinstance(template, str) and bool(_LOOPS.search(template))

    @classmethod
    def load(cls, name: str, codec: TextCodec, *, revision: str | None, trust_remote_code: bool) -> Vision:
        from transformers import AutoProcessor

        processor: Any = AutoProcessor.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
        return cls(processor, codec)

    def plain(self, request: Request) -> Request:
        """Return a request without images, with content in the form that the chat template reads."""
        if request.messages is None or not self._by_parts:
            return request
        return replace(request, messages=tuple(_in_parts(message) for message in request.messages))

    def text_and_images(self, request: Request) -> tuple[str, list[Any]]:
        """Return the rendered prompt, and its images as PIL objects. Raises AttemptError."""
        if not self._by_parts:
            message = "the model's chat template has no place for images"
            raise AttemptError(message, code="bad_request", retry=False)
        text = self._codec.render(self.plain(request))
        return text, [opened(url) for url in image_urls(request.messages)]

    def encode(self, request: Request) -> tuple[list[int], dict[str, Any]]:
        """Return the prompt's tokens, and further inputs of the model: tensors of one row. Raises AttemptError."""
        text, images = self.text_and_images(request)
        try:
            given: Any = self.processor(text=[text], images=images, return_tensors="pt", add_special_tokens=False)
        except (ValueError, TypeError, IndexError, KeyError, RuntimeError) as error:
            message = f"the model's processor refuses the images: {error}"
            raise AttemptError(message, code="bad_request", retry=False) from error
        found = dict(given)
        ids: list[int] = found.pop("input_ids")[0].tolist()
        found.pop("attention_mask", None)
        return self._codec.checked(ids, request), found


def opened(url: str) -> Any:
    """Open the image of a data: URL, in RGB. Raises AttemptError."""
    from PIL import Image

    try:
        if not is_data(url):
            raise ValueError("it was not fetched")
        return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2], validate=True))).convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise AttemptError(f"an image cannot be read: {error}", code="bad_request", retry=False) from error


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": [{"type": "text", "text": content}]}
    parts = cast("list[dict[str, Any]]", content or [])
    return {**message, "content": [part if part["type"] == "text" else {"type": "image"} for part in parts]}

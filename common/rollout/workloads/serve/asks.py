"""Requests of clients: the checked body, and the options that decide the form of the answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from rollout.model.errors import InputError
from rollout.workloads.infer.bodies import CHAT
from rollout.workloads.infer.prefix import blocks_of
from rollout.workloads.infer.request import RowRequest, parse_row
from rollout.workloads.json_form import JsonObject
from rollout.workloads.serve.config import ServeConfig
from rollout.workloads.serve.errors import ApiError

BODY_MAX = 3 << 20
"""Maximum size of a body in bytes. A message to a replica has 4 MiB and may also carry the tokens of a resumed
answer."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A checked request. `model` is the name that the answer repeats. With `include_usage` a last chunk reports the
    tokens used, with `continuous_usage` every chunk does. `blocks` are running hashes of the prompt, `choices` the
    number of choices."""

    url: str
    body: JsonObject
    model: str
    request: RowRequest
    choices: int
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    blocks: tuple[int, ...] = ()

    @property
    def chats(self) -> bool:
        return self.url == CHAT

    @property
    def must_call(self) -> bool:
        """Whether the request names a function that the model must call."""
        return isinstance(self.body.get("tool_choice"), dict)

    @property
    def has_tools(self) -> bool:
        return bool(self.body.get("tools")) and self.body.get("tool_choice") != "none"


def read_body(raw: bytes) -> JsonObject:
    """Parse a body. Raises ApiError 400 if it is not a JSON object."""
    try:
        body: Any = json.loads(raw, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not valid JSON: {error}", status=400) from None
    if not isinstance(body, dict):
        raise ApiError("the body must be a JSON object", status=400)
    return cast(JsonObject, body)


def ask_of(url: str, body: JsonObject, config: ServeConfig) -> Asked:
    """Check a body. Raises ApiError 404 if the model is unknown, 422 if the body asks for something unsupported."""
    name = body.get("model")
    if name is not None and not isinstance(name, str):
        raise ApiError("`model` must be a string", status=422, param="model")
    if name and name not in config.names and name not in config.model.loras:
        raise ApiError(f"The model `{name}` does not exist.", status=404, param="model")
    stream, options = body.get("stream") or False, body.get("stream_options")
    if not isinstance(stream, bool):
        raise ApiError("`stream` must be true or false", status=422, param="stream")
    if options is not None and (not isinstance(options, dict) or not stream):
        raise ApiError("`stream_options` must be an object, and needs `stream`", status=422, param="stream_options")
    wanted = cast(JsonObject, options or {})
    asked = {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
    try:
        row = {"custom_id": "", "url": url, "body": asked}
        request = parse_row(row, config.defaults, config.backend.kind)
        blocks = tuple(blocks_of(request))
    except InputError as error:
        raise ApiError(error.message.replace('"body.', '"'), status=422) from None
    usage = bool(wanted.get("include_usage"))
    n = request.body.get("n") if request.body is not None else request.sampling.n
    choices = (n if isinstance(n, int) else 1) * max(1, len(request.prompts))
    return Asked(
        url=url,
        body=asked,
        model=name if name in config.model.loras else config.names[0],
        request=request,
        choices=choices,
        stream=stream and not request.embeds,
        include_usage=usage,
        continuous_usage=usage and bool(wanted.get("continuous_usage_stats")),
        blocks=blocks,
    )


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")

"""`tools` and `tool_choice` of a chat: what the template gets, and the form of a forced call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from rollout.model.errors import InputError
from rollout.workloads.infer.prompts import kind_of
from rollout.workloads.json_form import JsonObject, short

_CHOICES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class Tools:
    """`definitions` are as written, for the chat template. `choice` is none, auto, required or named; if named, `name`
    is the function. `parallel` allows several calls in an answer."""

    definitions: tuple[JsonObject, ...]
    choice: str = "auto"
    name: str = ""
    parallel: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(one["function"]["name"] for one in self.definitions)

    def types_of(self, name: str) -> JsonObject:
        """Return the JSON schema type of each parameter of a function whose definition has one."""
        found = next((one for one in self.definitions if one["function"]["name"] == name), None)
        properties = _parameters(found).get("properties") if found is not None else None
        if not isinstance(properties, dict):
            return {}
        named = {
            key: cast(JsonObject, one) for key, one in cast(JsonObject, properties).items() if isinstance(one, dict)
        }
        return {key: one["type"] for key, one in named.items() if "type" in one}

    @property
    def schema(self) -> JsonObject | None:
        """Schema of an answer that must call: the arguments of a named function, else a list of calls."""
        if self.choice == "named":
            return next(_parameters(one) for one in self.definitions if one["function"]["name"] == self.name)
        if self.choice != "required":
            return None
        shared: JsonObject = {}
        calls: list[JsonObject] = []
        for one in self.definitions:
            parameters = dict(_parameters(one))
            shared |= parameters.pop("$defs", {})
            fields = {"name": {"enum": [one["function"]["name"]]}, "parameters": parameters}
            calls.append(
                {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
            )
        schema: JsonObject = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
        if not self.parallel:
            schema["maxItems"] = 1
        return {**schema, "$defs": shared} if shared else schema


def _parameters(tool: JsonObject) -> JsonObject:
    return tool["function"].get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}


def tools_of(body: JsonObject) -> Tools | None:
    """Parse the tools of a body; None if it has none. Raises InputError."""
    given, choice = body.get("tools"), body.get("tool_choice")
    if given is None:
        if choice not in (None, "none"):
            raise InputError('"body.tool_choice" needs "body.tools"')
        return None
    if not isinstance(given, list) or not given:
        wrong = "an empty list" if given == [] else kind_of(cast(object, given))
        raise InputError(f'"body.tools" must be a list of tools, not {wrong}')
    definitions = tuple(_definition(one, f"body.tools[{at}]") for at, one in enumerate(cast(list[Any], given)))
    parallel = body.get("parallel_tool_calls")
    if not isinstance(parallel, bool | None):
        raise InputError(f'"body.parallel_tool_calls" must be true or false, not {kind_of(parallel)}')
    tools = Tools(definitions, parallel=parallel is not False)
    name = _named(choice)
    if name is not None:
        if name not in tools.names:
            raise InputError(f'"body.tool_choice" names {short(name)}, which is none of "body.tools"')
        return Tools(definitions, "named", name, tools.parallel)
    if choice is not None and choice not in _CHOICES:
        raise InputError(
            f'"body.tool_choice" must be one of {", ".join(_CHOICES)}, or name a function: '
            '{"type": "function", "function": {"name": ...}}'
        )
    return Tools(definitions, choice or "auto", "", tools.parallel)


def _named(choice: Any) -> str | None:
    function = cast(JsonObject, choice).get("function") if isinstance(choice, dict) else None
    name = cast(JsonObject, function).get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _definition(tool: Any, what: str) -> JsonObject:
    function = cast(JsonObject, tool).get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or cast(JsonObject, tool).get("type") != "function":
        raise InputError(f'"{what}" must be {{"type": "function", "function": {{...}}}}')
    fields = cast(JsonObject, function)
    if not isinstance(fields.get("name"), str) or not fields["name"]:
        raise InputError(f'"{what}.function" needs a "name"')
    if not isinstance(fields.get("parameters"), dict | None):
        raise InputError(f'"{what}.function.parameters" must be a JSON schema, not {kind_of(fields["parameters"])}')
    return cast(JsonObject, tool)

"""YAML files with the line of every key, read with the values of YAML 1.2; nothing in them runs code.

YAML 1.1, which PyYAML implements, turns `no`, `on` and `yes` into truth values, `1:30` into ninety and `2024-01-01`
into a date. Here they are strings, as in ruamel.yaml and Go's yaml.v3. As in the latter, a key that takes true or false
(`Flag`) also accepts yes, no, on and off, and one that takes text (`Text`) accepts numbers as written: `version: 1.10`
is "1.10", and an environment variable may be `PORT: 8080`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NoReturn, cast

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode

from rollout.config.locate import DEPTH_MAX, Place
from rollout.config.written import WrittenFloat, WrittenInt

VALUES_MAX = 200_000
"""Maximum number of values of a file after its aliases are expanded; a few lines of aliases can stand for billions."""
_TAG = "tag:yaml.org,2002:"


class YamlError(ValueError):
    """All faults of a file as (line, fault), lines counted from 1."""

    def __init__(self, faults: list[tuple[int, str]]) -> None:
        super().__init__("; ".join(f"line {line}: {what}" for line, what in faults))
        self.faults = faults


def parse_yaml(text: str) -> tuple[dict[str, Any], dict[Place, int]]:
    """Return the mapping in `text`, and the line, from 1, of every key and list item. Raises YamlError with all
    faults."""
    try:
        documents = list(_reader().compose_all(text))
    except MarkedYAMLError as error:
        raise YamlError([_syntax_fault(error)]) from None
    except YAMLError as error:
        raise YamlError([(1, f"not valid YAML: {str(error).splitlines()[0]}")]) from None
    except RecursionError:
        raise YamlError([(1, f"not valid YAML: nested more than {DEPTH_MAX} levels deep")]) from None
    if not documents or documents[0] is None:
        return {}, {}
    if len(documents) > 1:
        raise YamlError([(documents[1].start_mark.line + 1, "a second document (---): keep one in a file")])
    return _Builder().build(documents[0])


def _syntax_fault(error: Any) -> tuple[int, str]:
    mark = error.problem_mark or error.context_mark
    what = " ".join(str(part) for part in (error.context, error.problem) if part)
    return (mark.line + 1 if mark else 1), f"not valid YAML: {what}"


def _reader() -> Any:
    reader: Any = YAML(typ="safe", pure=True)
    reader.allow_duplicate_keys = True  # the composer stops at the first; the builder tells of all
    reader.composer.warn_double_anchors = False  # YAML 1.2 lets the later one take its place
    return reader


class _Builder:
    """Builds values from nodes and collects faults, so that all are reported at once."""

    def __init__(self) -> None:
        self._lines: dict[Place, int] = {}
        self._faults: list[tuple[int, str]] = []
        self._count = 0

    def build(self, root: Any) -> tuple[dict[str, Any], dict[Place, int]]:
        if not isinstance(root, MappingNode):
            self._fault(root, "the file must hold keys and values, such as `n_attempts: 1`")
            values: Any = {}
        else:
            values = self._value(root, (), ())
        if self._faults:
            raise YamlError(sorted(set(self._faults)))
        return values, self._lines

    def _fault(self, node: Any, what: str) -> None:
        self._faults.append((node.start_mark.line + 1, what))

    def _stop(self, node: Any, what: str) -> NoReturn:
        self._fault(node, what)
        raise YamlError(sorted(set(self._faults)))

    def _value(self, node: Any, place: Place, open_nodes: tuple[int, ...]) -> Any:
        self._count += 1
        if self._count > VALUES_MAX:
            self._stop(node, f"more than {VALUES_MAX:,} values, aliases (*name) written out")
        if id(node) in open_nodes:
            self._stop(node, "an alias (*name) inside the value it stands for")
        if len(place) > DEPTH_MAX:
            self._stop(node, f"nested more than {DEPTH_MAX} levels deep")
        opened = (*open_nodes, id(node))
        if isinstance(node, MappingNode):
            self._standard(node, "map")
            return self._mapping(cast("Any", node), place, opened)
        if isinstance(node, SequenceNode):
            self._standard(node, "seq")
            items = list[Any]()
            for index, item in enumerate(cast("list[Any]", cast("Any", node).value)):
                self._lines.setdefault((*place, index), item.start_mark.line + 1)
                items.append(self._value(item, (*place, index), opened))
            return items
        return self._scalar(node)

    def _mapping(self, node: Any, place: Place, opened: tuple[int, ...]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        own = list[tuple[str, Any, Any]]()
        for key_node, value_node in node.value:
            key = self._key(key_node)
            if key == "<<" and key_node.style is None:
                for source in reversed(list(self._merged(value_node))):  # the first one has the last word
                    values |= self._value(source, place, opened)
            elif key is not None:
                own.append((key, key_node, value_node))
        seen: dict[str, int] = {}
        for key, key_node, value_node in own:  # after what is merged, over which they go
            line = key_node.start_mark.line + 1
            if key in seen:
                self._fault(key_node, f'the key "{key}" stands here and on line {seen[key]}: keep one')
                continue
            seen[key] = self._lines[(*place, key)] = line
            values[key] = self._value(value_node, (*place, key), opened)
        return values

    def _merged(self, node: Any) -> Iterator[Any]:
        sources = cast("list[Any]", cast("Any", node).value) if isinstance(node, SequenceNode) else [node]
        for source in sources:
            if isinstance(source, MappingNode):
                yield source
            else:
                self._fault(source, "<< takes a mapping (*name), or a list of mappings")

    def _key(self, node: Any) -> str | None:
        if isinstance(node, ScalarNode):
            return str(cast("Any", node).value)
        self._fault(node, "a key must be plain text")
        return None

    def _standard(self, node: Any, kind: str) -> None:
        if str(node.tag) != _TAG + kind:
            self._fault(node, f"the tag {node.tag} means nothing here: remove it")

    def _scalar(self, node: Any) -> Any:
        kind, text = str(node.tag).removeprefix(_TAG), str(node.value)
        if kind in ("str", "timestamp", "value"):
            return text
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() == "true"
        if kind not in ("int", "float"):
            self._fault(node, f"the tag {node.tag} means nothing here: remove it")
            return None
        try:
            return self._number(node, kind, text)
        except (ValueError, IndexError):  # IndexError: an empty one, tagged as a number
            self._fault(node, f'"{text[:40]}" is no number that can be used here')
            return None

    def _number(self, node: Any, kind: str, text: str) -> Any:
        construct: Any = SafeConstructor(loader=_reader())
        value = construct.construct_yaml_int(node) if kind == "int" else construct.construct_yaml_float(node)
        if kind == "float" and not math.isfinite(value):
            raise ValueError
        written = WrittenInt(value) if kind == "int" else WrittenFloat(value)
        written.source = text
        return written

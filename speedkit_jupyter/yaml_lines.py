"""YAML read safely, with the line of every key and the keys that stand twice."""

from __future__ import annotations

import reprlib
from typing import Any

import yaml

from speedkit_jupyter.exceptions import ConfigError

Path = tuple[str, ...]


def load(text: str, name: str) -> tuple[dict[str, Any], dict[Path, int], list[tuple[Path, int]]]:
    """The mapping, the line of each key's path, and the duplicate keys with their lines.

    Raises ConfigError for YAML syntax errors and for a file that is not a mapping.
    """
    lines: dict[Path, int] = {}
    duplicates: list[tuple[Path, int]] = []
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        _walk(node, (), lines, duplicates, set())
        values = None if node is None else loader.construct_document(node)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError([f"{name}{_line(error, text)}: YAML syntax: {_what(error)}"]) from None
    if values is None:
        return {}, {}, []
    if not isinstance(values, dict):
        raise ConfigError(
            [
                f"{name}, line 1: a config is a mapping, as in 'precision: auto'; "
                f"this is {shown(values)}"
            ]
        )
    return values, lines, duplicates


def shown(value: Any) -> str:
    """A value for a message, cut: a few anchors can stand for more than fits in memory."""
    short = reprlib.Repr()
    short.maxstring, short.maxlevel = 60, 2
    return short.repr(value)


def _line(error: Exception, text: str) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark):
        return f", line {mark.line + 1}"
    if isinstance(error, yaml.reader.ReaderError):
        return f", line {text.count(chr(10), 0, error.position) + 1}"
    return ""


def _what(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem:
        return str(error.problem)
    return str(error).splitlines()[0]


def _walk(
    node: Any, path: Path, lines: dict[Path, int], twice: list[tuple[Path, int]], seen: set[int]
) -> None:
    """Notes the keys' lines; an anchor's mapping is walked once, for it may contain itself."""
    if not isinstance(node, yaml.MappingNode) or id(node) in seen:
        return
    seen.add(id(node))
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode) and not key.tag.endswith(":merge"):
            key.tag = "tag:yaml.org,2002:str"  # `on:` and `1:` are words too where keys stand
        here = (*path, str(key.value))
        line = key.start_mark.line + 1
        if here in lines:
            twice.append((here, line))
        lines[here] = line
        _walk(value, here, lines, twice, seen)

"""YAML read safely, with the line of every key and the keys that stand twice."""

from __future__ import annotations

from typing import Any

import yaml

from speedkit_jupyter.exceptions import ConfigError

Path = tuple[str, ...]


def load(text: str, name: str) -> tuple[dict[str, Any], dict[Path, int], list[tuple[Path, int]]]:
    """The mapping, the line of each key's path, and the duplicate keys with their lines.

    Raises ConfigError for YAML syntax errors and for a file that is not a mapping.
    """
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError([f"{name}{line}: YAML syntax: {error.problem}"]) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError([f"{name}: YAML syntax: {str(error).splitlines()[0]}"]) from None
    if values is None:
        return {}, {}, []
    if not isinstance(values, dict):
        raise ConfigError(
            [f"{name}, line 1: a config is a mapping, as in 'precision: auto'; this is {values!r}"]
        )
    lines: dict[Path, int] = {}
    duplicates: list[tuple[Path, int]] = []
    _walk(node, (), lines, duplicates)
    return {str(key): value for key, value in values.items()}, lines, duplicates


def _walk(node: Any, path: Path, lines: dict[Path, int], twice: list[tuple[Path, int]]) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        here = (*path, str(key.value))
        line = key.start_mark.line + 1
        if here in lines:
            twice.append((here, line))
        lines[here] = line
        _walk(value, here, lines, twice)

"""YAML read safely, with the line of every key and the keys that stand twice.

A few hundred bytes can stand for gigabytes, so a config has no aliases, and limits on size and
depth.
"""

from __future__ import annotations

import os
import reprlib
from typing import Any

import yaml

from speedkit_jupyter.support.exceptions import ConfigError

Path = tuple[str, ...]
# A config has a dozen options, a few fields deep.
MOST_BYTES, MOST_DEPTH = 64 * 1024, 10


def read(path: str | os.PathLike[str]) -> str:
    """Return the text of a file, of which no more is read than a config may have.

    Raises OSError, and ValueError for a file that is longer or no text.
    """
    with open(path, "rb") as file:
        raw = file.read(MOST_BYTES + 1)
    if len(raw) > MOST_BYTES:
        raise ValueError(f"a config has at most {MOST_BYTES // 1024} KiB")
    return raw.decode("utf-8")


def load(text: str, name: str) -> tuple[dict[str, Any], dict[Path, int], list[tuple[Path, int]]]:
    """Return the mapping, the line of each key's path, and the duplicate keys with their lines.

    Raises ConfigError for what is no YAML, no mapping, too deep, or has aliases.
    """
    lines: dict[Path, int] = {}
    duplicates: list[tuple[Path, int]] = []
    try:
        _check(text)
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        _walk(node, (), lines, duplicates)
        values = None if node is None else loader.construct_document(node)
    # PyYAML's own constructors raise KeyError and others for `!!bool no-bool`.
    except Exception as error:
        raise ConfigError([f"{name}{_line(error, text)}: YAML syntax: {_what(error)}"]) from None
    if values is None:
        return {}, {}, []
    if not isinstance(values, dict):
        must_be = "a config is a mapping, as in 'precision: auto'"
        raise ConfigError([f"{name}, line 1: {must_be}; this is {shown(values)}"])
    return values, lines, duplicates


def shown(value: Any) -> str:
    """Return a value for a message, cut."""
    short = reprlib.Repr()
    short.maxstring, short.maxlevel = 60, 2
    try:
        return short.repr(value)
    except ValueError:  # Python writes no number of more than some thousand digits
        return "a number with thousands of digits"


def _check(text: str) -> None:
    """Refuse aliases and depth before anything is built of them."""
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        problem = "a config has no aliases" if isinstance(event, yaml.AliasEvent) else ""
        problem = f"more than {MOST_DEPTH} levels deep" if depth > MOST_DEPTH else problem
        if problem:
            mark: Any = event.start_mark
            raise yaml.composer.ComposerError(problem=problem, problem_mark=mark)


def _line(error: Exception, text: str) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark):
        return f", line {mark.line + 1}"
    if isinstance(error, yaml.reader.ReaderError):
        return f", line {text.count(chr(10), 0, error.position) + 1}"
    return ""


def _what(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem:
        return " ".join(str(error.problem).split())
    if isinstance(error, yaml.YAMLError | ValueError):
        return (str(error).splitlines() or [""])[0]
    return "a tag does not fit its value"


def _walk(node: Any, path: Path, lines: dict[Path, int], twice: list[tuple[Path, int]]) -> None:
    """Note the line of each key; `on:` and `1:` are words too where keys stand."""
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if isinstance(key, yaml.ScalarNode):
            key.tag = "tag:yaml.org,2002:str"
            here, line = (*path, str(key.value)), key.start_mark.line + 1
            if here in lines:
                twice.append((here, line))
            lines[here] = line
            _walk(value, here, lines, twice)

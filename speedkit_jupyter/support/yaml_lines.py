"""YAML read safely, with the line of every key and the keys that stand twice.

A few hundred bytes can nest and repeat themselves into gigabytes, so that there are limits: on the
text, on depth, and on what all its aliases stand for.
"""

from __future__ import annotations

import os
import reprlib
from typing import Any

import yaml

from speedkit_jupyter.support.exceptions import ConfigError

Path = tuple[str, ...]
# A config has a dozen options, a few fields deep.
MOST_BYTES, MOST_DEPTH, MOST_VALUES = 64 * 1024, 10, 2000


def read(path: str | os.PathLike[str]) -> str:
    """The text of a file, of which no more is read than a config may have.

    Raises OSError, and ValueError for a file that is longer or no text.
    """
    with open(path, "rb") as file:
        raw = file.read(MOST_BYTES + 1)
    if len(raw) > MOST_BYTES:
        raise ValueError(f"a config has at most {MOST_BYTES // 1024} KiB")
    return raw.decode("utf-8")


def load(text: str, name: str) -> tuple[dict[str, Any], dict[Path, int], list[tuple[Path, int]]]:
    """The mapping, the line of each key's path, and the duplicate keys with their lines.

    Raises ConfigError for YAML syntax errors, for a file that is not a mapping, and for one that
    is too large, too deep, or whose aliases stand for too much.
    """
    lines: dict[Path, int] = {}
    duplicates: list[tuple[Path, int]] = []
    try:
        loader = _Bounded(text)
        node = loader.get_single_node()
        _count(node, {})
        _walk(node, (), lines, duplicates)
        values = None if node is None else loader.construct_document(node)
    # PyYAML's own constructors raise KeyError and others for `!!bool no-bool`.
    except Exception as error:
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
    try:
        return short.repr(value)
    except ValueError:  # Python writes no number of more than some thousand digits
        return f"a number of {type(value).__name__}'s longest"


class _Bounded(yaml.SafeLoader):
    """Gives up while it reads, not after."""

    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise _refused(f"more than {MOST_DEPTH} levels deep", self.peek_event())
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


def _count(node: Any, known: dict[int, int | None]) -> int:
    """How many values a node stands for once all aliases and merges are written out."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in known:
        known[id(node)] = None  # not known yet: met again below means inside itself
        parts = [node.value] if isinstance(node, yaml.SequenceNode) else node.value
        known[id(node)] = 1 + sum(_count(part, known) for some in parts for part in some)
    count = known[id(node)]
    if count is None:
        raise _refused("it contains itself", node)
    if count > MOST_VALUES:
        raise _refused(f"its aliases stand for more than {MOST_VALUES} values", node)
    return count


def _refused(problem: str, node: Any) -> yaml.MarkedYAMLError:
    return yaml.composer.ComposerError(problem=problem, problem_mark=node.start_mark)


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
    """Notes the keys' lines."""
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        if not key.tag.endswith(":merge"):
            key.tag = "tag:yaml.org,2002:str"  # `on:` and `1:` are words too where keys stand
        here = (*path, str(key.value))
        line = key.start_mark.line + 1
        if here in lines:
            twice.append((here, line))
        lines[here] = line
        _walk(value, here, lines, twice)

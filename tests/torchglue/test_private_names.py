"""Only four files of torchglue/ use torch's private names, and tests call each function there."""

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import speedkit_jupyter

PACKAGE = Path(speedkit_jupyter.__file__).parent
HOMES = [PACKAGE / f"torchglue/{one}.py" for one in ("private", "dynamo", "inductor", "modules")]
# support/ can't import torchglue/, so wrappers.py names the private parts of wrappers itself.
SOURCES = sorted({*PACKAGE.rglob("*.py")} - {*HOMES, PACKAGE / "support" / "wrappers.py"})
# Match `_name`, even after a dot or colons (`torch._C`, `aten::_softmax`), not `__name__`, `a_b`.
PRIVATE = re.compile(r"(?<!\w)_[A-Za-z]\w*|\btorch_(?:dynamo|inductor|functorch)\w*")
# Private names from elsewhere than torch, by origin. Add new ones here.
OTHERS = {
    "Python": "_getframe _asdict _replace _fields _filters_mutated _actions _option_string_actions "
    "_get_positional_actions _DummyThread _thread _frozen_importlib _abc _collections _ctypes "
    "_operator _struct _make _multiprocessing _SimpleCData _exit _lru_cache_wrapper "
    "_set_running_loop _current_frames _IncompleteInputError",
    "IPython, pytest, matplotlib, ipywidgets": "_repr_mimebundle_ _render_traceback_ "
    "_showtraceback _async_thread _modified_open "
    "_thread_loop _filename_map _oh _i _pytest _pylab_helpers _instances",
    "ipykernel": "_reply_subshell_for",
    "Accelerate, Lightning, transformers": "_shared_state _original_module _hf_hook _models "
    "_previous_max_cache_length _can_compile_fullgraph _compile_all_devices",
    "HTML": "_blank",
    "this package, in text": "_Fields _draw _checked_ _launched_ _launched_arguments "
    "_launched_function _launched_result _launched_value",
}
NO_NAMES_OF_TORCH = frozenset(" ".join(OTHERS.values()).split())
nodes = functools.lru_cache(1)(lambda text: [*ast.walk(ast.parse(text))])  # walking is slow


def own_names(text: str) -> set[str]:
    """Return the private functions, classes, variables and attributes of `self` in the code."""
    names: set[str] = set()
    for node in nodes(text):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            is_own = isinstance(node, ast.Name) or ast.unparse(node.value) in ("self", "cls")
            names |= {node.id if isinstance(node, ast.Name) else node.attr} if is_own else set()
        elif isinstance(node, ast.arg):
            names.add(node.arg)
    return {name for name in names if PRIVATE.fullmatch(name)}


def attributes(text: str) -> Iterator[tuple[str, bool]]:
    """Yield each private attribute that code uses, and whether it is one of `self` or `cls`."""
    for node in nodes(text):
        if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr):
            yield node.attr, ast.unparse(node.value) in ("self", "cls", "super()")


def in_text(text: str) -> Iterator[str]:
    """Yield the private names in strings, docstrings, comments and imports.

    In an f-string, `_name` right after a value is skipped, as in f"{flag}_seconds".
    """
    endings = {
        id(after)
        for node in nodes(text)
        if isinstance(node, ast.JoinedStr)
        for before, after in zip(node.values, node.values[1:], strict=False)
        if isinstance(before, ast.FormattedValue)
    }
    for node in nodes(text):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            value = node.value
            yield from PRIVATE.findall(f"x{value}" if id(node) in endings else value)
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(PACKAGE.name):
            yield from PRIVATE.findall(" ".join((node.module or "", *(a.name for a in node.names))))
        elif isinstance(node, ast.Import):
            yield from PRIVATE.findall(" ".join(alias.name for alias in node.names))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield from PRIVATE.findall(token.string)


def foreign_names(text: str, anywhere: frozenset[str] = frozenset()) -> set[str]:
    """Return the private names in a file that neither the file nor OTHERS defines.

    Attributes of `self` may come from a base class, so names in `anywhere` are left out.
    """
    found = {name for name, is_self in attributes(text) if not (is_self and name in anywhere)}
    return (found | {*in_text(text)}) - own_names(text) - NO_NAMES_OF_TORCH


@pytest.mark.long
def test_no_other_file_has_private_names_of_torch() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCES}
    anywhere = frozenset(name for text in texts.values() for name in own_names(text))
    found = {
        str(path.relative_to(PACKAGE)): sorted(names)
        for path, text in texts.items()
        if (names := foreign_names(text, anywhere))
    }
    assert found == {}


@pytest.mark.parametrize("home", HOMES, ids=lambda one: one.stem)
def test_each_name_is_called_in_a_test(home: Path) -> None:
    public = {name for name in defined(home) if not name.startswith("_")}
    test = ast.parse(Path(__file__).with_name(f"test_{home.stem}.py").read_text(encoding="utf-8"))
    used = {node.attr for node in ast.walk(test) if isinstance(node, ast.Attribute)}
    assert public
    assert sorted(public - used) == []


def defined(path: Path) -> Iterator[str]:
    """Yield the names of a file's functions and constants."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = (name for target in targets for name in ast.walk(target))
            yield from (name.id for name in names if isinstance(name, ast.Name))

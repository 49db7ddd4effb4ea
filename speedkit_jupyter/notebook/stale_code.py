"""Compiled code that still runs a function or a class which a later cell has redefined."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

import torch

from speedkit_jupyter.catalog.properties.calls import is_compiled
from speedkit_jupyter.catalog.properties.compiled import CompiledCall
from speedkit_jupyter.plans.compile_history import Finding
from speedkit_jupyter.support.lookup import attributes_of, named, public
from speedkit_jupyter.support.source_lines import Spot
from speedkit_jupyter.support.wrappers import unwrapped
from speedkit_jupyter.torchglue import dynamo as torch_private
from speedkit_jupyter.torchglue.modules import COMPILED_CALL

KIND = "stale"


def stale(names: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield compiled functions and models of a notebook that run code of earlier cells."""
    if not torch_private.is_dynamo_loaded():
        return
    for word, value in public(names):
        old = torch_private.compiled_from(value) if type(value) is FunctionType else None
        if old is not None and word != _name(old) and (new := _newer(names, old)) is not None:
            remedy = f"compile it again: `{word} = torch.compile({_name(old)})`"
            yield _finding(word, f"the earlier `{_name(old)}`", new, remedy)
    for word, model in named(names, torch.nn.Module).items():
        is_wrapped = torch_private.compiled_from(model) is not None
        if not (is_wrapped or any(map(is_compiled, model.modules()))):
            continue
        kind = type(unwrapped(model))
        if (new := _newer(names, kind)) is not None:
            remedy = f"make `{word}` again, and compile that"
            yield _finding(word, f"the earlier class `{kind.__name__}`", new, remedy)
        for other in _changed(model):
            remedy = f"`%speedkit apply {word}` once more"
            yield _finding(word, f"an earlier `{other.__name__}.forward`", other.forward, remedy)


def _finding(word: str, what: str, new: Any, remedy: str) -> Finding:
    return Finding(KIND, _spot(new), f"the compiled `{word}` still runs {what}", remedy)


def _newer(names: Mapping[str, Any], old: Any) -> Any:
    """Return the newer function or class of the same name in the notebook; None without one."""
    new = names.get(_name(old))
    is_users = getattr(old, "__module__", "") == "__main__" == getattr(new, "__module__", None)
    is_other = new is not old and torch_private.compiled_from(new) is not old
    return new if is_users and is_other and type(new) is type(old) else None


def _changed(model: Any) -> Iterator[Any]:
    """Yield the classes of parts whose `forward` has changed since a plan compiled it."""
    every = ((part, attributes_of(part).get(COMPILED_CALL)) for part in model.modules())
    ours = [(part, call.code.forwards) for part, call in every if isinstance(call, CompiledCall)]
    kinds = ((type(one), made) for part, made in ours if made for one in part.modules())
    yield from dict.fromkeys(kind for kind, made in kinds if kind.forward not in made)


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", ""))


def _spot(new: Any) -> Spot | None:
    """Return where a function, or the first method of a class, is written."""
    methods = (getattr(one, "__code__", None) for one in (new, *vars(new).values()))
    code = next((code for code in methods if code is not None), None)
    return None if code is None else Spot(code.co_filename, code.co_firstlineno)

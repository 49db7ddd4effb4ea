"""What a step's code can reach: models, optimizers, schedulers, lists, counters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.wrappers import each_once, is_wrapper, unwrapped

if TYPE_CHECKING:
    import torch


def reached(values: Iterable[Any], depth: int = 4) -> list[Any]:
    """The values and what lies behind them: a function's globals and closure, an object's parts.

    Nothing is run and no attribute is computed: only dictionaries and cells are read.
    """
    found: dict[int, Any] = {}
    for value in values:
        _reach(value, found, depth)
    return list(found.values())


def _reach(value: Any, found: dict[int, Any], depth: int) -> None:
    """Functions lead to their globals and closures, plain objects to what they hold."""
    if id(value) in found or depth == 0 or isinstance(value, ModuleType):
        return
    found[id(value)] = value
    if isinstance(value, MethodType):
        _reach(value.__self__, found, depth)
        value = value.__func__
    if isinstance(value, FunctionType):
        for one in _variables(value):
            _reach(one, found, depth - 1)
    elif isinstance(value, list | tuple) and len(value) <= 32:
        for one in value:
            _reach(one, found, depth - 1)
    elif isinstance(value, dict) and len(value) <= 32:
        for one in list(value.values()):
            _reach(one, found, depth - 1)
    elif _is_the_users(value):
        for one in list(vars(value).values()):
            _reach(one, found, depth - 1)


def _variables(function: FunctionType) -> Iterator[Any]:
    """The values of a function's closure and of the globals that it names, also in a lambda or a
    comprehension inside it. (`inspect.getclosurevars` fails on a variable that has no value yet.)
    """
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # no value yet
            yield cell.cell_contents
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [one for one in code.co_consts if isinstance(one, CodeType)]
        yield from (
            function.__globals__[name] for name in code.co_names if name in function.__globals__
        )


def _is_the_users(value: Any) -> bool:
    """An instance of a class that was written in the notebook or in the user's own files."""
    import torch

    home = type(value).__module__.partition(".")[0]
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, type | torch.nn.Module | torch.Tensor)
        and home not in ("torch", "numpy", "builtins", "IPython", "speedkit_jupyter")
    )


def outermost(found: Sequence[Any]) -> list[torch.nn.Module]:
    """The models among objects that have parameters and are not part of another."""
    import torch

    modules = [one for one in found if isinstance(one, torch.nn.Module)]
    inside = {id(part) for one in modules for part in list(one.modules())[1:]}
    return [m for m in modules if id(m) not in inside and next(m.parameters(), None) is not None]


def bystanders_among(found: Sequence[Any], known: Sequence[Any]) -> list[Any]:
    """The modules and optimizers among objects that are none of the known, nor part of them, nor
    wrappers of them.
    """
    import torch

    inside = {id(one) for one in (*known, *map(unwrapped, known))}
    for one in (*known, *found):
        if isinstance(one, torch.nn.Module):
            inside.update(id(part) for part in list(one.modules())[1:])
    kinds = (torch.nn.Module, torch.optim.Optimizer)
    others = [one for one in found if isinstance(one, kinds) and id(one) not in inside]
    return [one for one in others if id(unwrapped(one)) not in inside and not _is_shell(one)]


def _is_shell(found: Any) -> bool:
    """Whether it is an optimizer that only passes on to another: that one is reached as well."""
    import torch

    return isinstance(found, torch.optim.Optimizer) and is_wrapper(found)


def optimizers_among(found: Sequence[Any]) -> list[torch.optim.Optimizer]:
    """The optimizers among objects, those behind wrappers."""
    import torch

    return each_once(one for one in found if isinstance(one, torch.optim.Optimizer))


def holding(
    optimizers: Iterable[torch.optim.Optimizer], model: torch.nn.Module
) -> list[torch.optim.Optimizer]:
    """The optimizers that hold a parameter of the model, each once and without its wrapper."""
    parameters = {id(p) for p in model.parameters()}
    return [
        one
        for one in each_once(optimizers)
        if any(id(p) in parameters for group in one.param_groups for p in group["params"])
    ]


def others_among(found: Sequence[Any]) -> list[Any]:
    """What may change beside models (whose parameters are theirs) and optimizers."""
    import torch

    owned = {
        id(tensor)
        for one in found
        if isinstance(one, torch.nn.Module)
        for tensor in (*one.parameters(), *one.buffers())
    }
    kinds = (torch.nn.Module, torch.optim.Optimizer, type)
    others = [one for one in found if not isinstance(one, kinds) and id(one) not in owned]
    return others + [one for one in found if _is_shell(one)]

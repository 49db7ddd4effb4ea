"""Wrappers around a module's calls, in an attribute that torch does not copy or pickle."""

from __future__ import annotations

import copy
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, cast

import torch

from speedkit_jupyter.catalog.model_changes import overrides
from speedkit_jupyter.catalog.model_changes.overrides import Optimizers
from speedkit_jupyter.torchglue.modules import (
    BACKWARD_HOOKS,
    COMPILED_CALL,
    FORWARD_HOOKS,
    module_table,
    plain_call,
)
from speedkit_jupyter.torchglue.private import tree_leaves, tree_map

HOOKS = (*FORWARD_HOOKS, *BACKWARD_HOOKS)


class Call:
    """One wrapper around the calls of `module`, with a weak reference to the module.

    `inner` is the next wrapper or the user's compiled call; None for the module's own call. A
    wrapper acts only in the thread `only_in`, or in all threads if None. The report shows `notes`.
    """

    compiles: ClassVar[bool] = False
    order: ClassVar[int] = 0  # wrappers of a higher order are outside, whichever plan came first
    recomputes: ClassVar[bool] = False  # True if the backward pass recomputes the call

    def __init__(self, module: Any, notes: Any = None, only_in: int | None = None) -> None:
        self._module = weakref.ref(module)
        self.notes, self.only_in = {} if notes is None else notes, only_in
        self.inner: Callable[..., Any] | None = None

    @property
    def module(self) -> torch.nn.Module:
        """Return the wrapped module; None once the module is deleted."""
        return cast("torch.nn.Module", self._module())

    def acts(self) -> bool:
        """Return whether the wrapper acts: in its thread, outside of compiling and tracing."""
        if torch.compiler.is_compiling():  # first, because Dynamo can't trace the next lines
            return False
        is_here = self.only_in in (None, threading.get_ident())
        return is_here and not torch.jit.is_tracing()  # type: ignore[attr-defined]

    def below(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the call without this wrapper."""
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return plain_call(self.module)(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy the wrapper as None: some modules pickle their whole `__dict__`."""
        return (type(None), ())


class Calls(overrides.Property):
    """The wrappers around a module's calls. Among equal `order`, the last applied is outermost."""

    def found(self, thing: torch.nn.Module, optimizers: Optimizers) -> Any:
        return thing.__dict__.get(COMPILED_CALL, overrides.MISSING)

    def holds(self, thing: torch.nn.Module, override: Call) -> bool:
        now, layers = thing.__dict__.get(COMPILED_CALL, overrides.MISSING), self.every().get(thing)
        if now is None:  # the wrapper of `extras.auto` wrote None to be skipped
            return layers is not None
        ours = () if layers is None else layers.overrides.values()
        return any(now is one for one in (override, *ours))

    def put(self, thing: torch.nn.Module, override: Call, optimizers: Optimizers) -> None:
        layers = self.every()[thing]
        own = None if layers.original is overrides.MISSING else layers.original
        inner = own
        for call in sorted(layers.overrides.values(), key=lambda call: call.order):
            if own is None or not call.compiles:  # the user's compiled code replaces a plan's
                call.inner, inner = inner, call
        if inner is not None:
            thing.__dict__[COMPILED_CALL] = inner

    def put_back(self, thing: Any, original: Any, override: Call, optimizers: Optimizers) -> None:
        if self.holds(thing, override):
            overrides.put_back_entries(thing.__dict__, {COMPILED_CALL: original})


# A global, because several plans may wrap the calls of the same module.
CALLS = Calls()


def around(module: torch.nn.Module, kind: type[Call]) -> bool:
    """Return whether the module has a call wrapper of this class."""
    return any(isinstance(call, kind) for call in chain(module))


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether a call of the module goes through compiled code."""
    return any(not isinstance(call, Call) or call.compiles for call in chain(module))


def is_compiled_by_user(module: torch.nn.Module) -> bool:
    """Return whether the user, not a plan, has compiled the module in place."""
    return any(not isinstance(call, Call) for call in chain(module))


def chain(module: torch.nn.Module) -> Iterator[Any]:
    """Yield a module's call wrappers, outermost first, then the user's compiled call, if any."""
    call = getattr(module, COMPILED_CALL, None)
    while call is not None:
        yield call
        call = call.inner if isinstance(call, Call) else None


def has_hooks(module: torch.nn.Module, kinds: Iterable[str] = HOOKS) -> bool:
    """Return whether the module or a part of it has hooks of these kinds."""
    return any(getattr(part, kind) for part in module.modules() for kind in kinds)


def has_own_forward(module: torch.nn.Module) -> bool:
    """Return whether an attribute of the module replaces the `forward` of its class."""
    own = vars(module).get("forward")
    return own is not None and getattr(own, "__func__", None) is not type(module).forward


def graph_of(results: Iterable[Any]) -> list[Any]:
    """Return the autograd nodes behind the tensors in the results."""
    tensors = (one for one in results if isinstance(one, torch.Tensor))
    nodes: list[Any] = [*dict.fromkeys(one.grad_fn for one in tensors if one.grad_fn)]
    seen = {*nodes}
    for node in nodes:
        inner = {one for one, _ in node.next_functions if one} - seen
        seen |= inner
        nodes += inner
    return nodes


def converted(results: Any, convert: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return results in the same structure, with each tensor replaced by `convert(tensor)`.

    Containers are copied. A dataclass or distribution is copied only if one of its tensors changes.
    """
    known: dict[int, tuple[Any, Any]] = {}  # by id: the value, kept alive, and its result

    def replaced(value: Any) -> Any:
        if id(value) not in known:
            known[id(value)] = value, value  # for self-references
            known[id(value)] = value, _replaced(value)
        return known[id(value)][1]

    def _replaced(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return convert(value)
        if not (parts := parts_of(value)):
            return value
        changed = tree_map(replaced, parts)
        pairs = zip(tree_leaves(changed), tree_leaves(parts), strict=True)
        if all(new is old for new, old in pairs):
            return value
        result = copy.copy(value)
        for name, part in changed.items():
            object.__setattr__(result, name, part)
        return result

    try:
        return tree_map(replaced, results)
    finally:
        known.clear()  # the two functions refer to each other, and would keep tensors alive


def parts_of(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, or the attributes of a distribution; else an empty dict."""
    if isinstance(value, torch.distributions.Distribution):
        return dict(vars(value))
    is_data = dataclasses.is_dataclass(value) and not isinstance(value, type)
    names = [one.name for one in dataclasses.fields(value)] if is_data else []
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _has_methods(kind: type) -> bool:
    """Return whether the user's class has public methods in addition to `forward`."""
    own = (one for one in kind.__mro__ if not one.__module__.startswith("torch."))
    names = {name for one in own if one is not object for name in vars(one)}
    methods = (name for name in names - {"forward"} if not name.startswith("_"))
    return any(callable(getattr(kind, name, None)) for name in methods)


def parts_called(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield (expression, submodule) for submodules that methods other than `forward` may call."""
    return _parts(model, "model") if _has_methods(type(model)) else iter(())


def _parts(module: torch.nn.Module, name: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield (expression, child); for a container its items, for a peft layer also its children."""
    is_dict = isinstance(module, torch.nn.ModuleDict)
    for key, child in module_table(module).items():
        called = f"{name}.{key}" if key.isidentifier() and not is_dict else f"{name}[{key}]"
        called = f"{name}[{key!r}]" if is_dict else called
        is_container = isinstance(child, torch.nn.ModuleList | torch.nn.ModuleDict)
        if child is not None and not is_container:  # containers are never called
            yield called, child
        if is_container or type(child).__module__.startswith("peft.tuners."):
            yield from _parts(cast("torch.nn.Module", child), called)

"""One observed call of a step: its module calls, its loaders, its optimizers, and its own code."""

from __future__ import annotations

import ast
import linecache
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

from speedkit_jupyter.rounds import clock
from speedkit_jupyter.support.source_lines import Spot, is_users
from speedkit_jupyter.torchglue.confinement import optimizer_hooks, patched
from speedkit_jupyter.torchglue.modules import loader_iterator
from speedkit_jupyter.torchglue.private import tree_map, version
from speedkit_jupyter.torchglue.samples import tensors_in

N = TypeVar("N", bound=ast.AST)
Function = ast.FunctionDef | ast.AsyncFunctionDef
Original = Callable[..., Any]


@dataclass
class ObservedModelCall:
    """A call of an outermost module, in the optimizer step `step`.

    `versions` are the versions of input tensors and parameters before it, which each write raises.
    """

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    step: int
    training: bool
    versions: tuple[int, ...]
    has_graph: bool = False

    def __call__(self) -> object:
        return self.module(*self.args, **self.kwargs)

    @property
    def inputs(self) -> list[torch.Tensor]:
        return tensors_in((self.args, self.kwargs))

    @property
    def key(self) -> tuple[object, ...]:
        """Return a key that is equal for calls that compute the same from the same tensors."""
        inputs = tuple(map(id, self.inputs))
        return id(self.module), self.step, self.training, self.versions, inputs

    @property
    def has_dropout(self) -> bool:
        """Return whether two calls differ on purpose."""
        drops = (one for one in self.module.modules() if "Dropout" in type(one).__name__)
        return any(getattr(one, "training", False) and getattr(one, "p", 1) for one in drops)

    def with_rows(self, times: int) -> ObservedModelCall:
        """Return the same call with every tensor's rows repeated; a vector is one row."""
        is_row = any(one.dim() < 2 for one in self.inputs)

        def grown(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or not (leaf.dim() or is_row):
                return leaf
            rows = leaf.detach()
            return torch.cat([rows[None] if is_row else rows] * times)

        args, kwargs = tree_map(grown, (self.args, dict(self.kwargs)))
        return replace(self, args=args, kwargs=kwargs)


@dataclass
class LoaderTimes:
    """Seconds of one DataLoader: for the start of each loop, each batch, and each loop's end."""

    begun_s: list[float] = field(default_factory=list)
    next_s: list[float] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)


@dataclass
class ObservedCall:
    """Observations of one call of the step. Optimizers and loaders may be made in the step itself.

    `calls` are calls of outermost modules, `times` counts calls of all modules by class. Each of
    `backwards` says whether a backward() retains the graph, and whether it creates one. `held` are
    ids of stepped parameters, `got_gradients` of those whose gradients were written to.
    `attentions` are calls of SDPA, one for each mask: partial functions of query, key, value, mask.
    """

    calls: list[ObservedModelCall] = field(default_factory=list)
    times: Counter[type] = field(default_factory=Counter)
    backwards: list[tuple[bool, bool]] = field(default_factory=list)
    gradients_asked: bool = False
    held: set[int] = field(default_factory=set)
    got_gradients: set[int] = field(default_factory=set)
    steps: int = 0
    loaders: dict[int, DataLoader[Any]] = field(default_factory=dict)
    draws: dict[int, LoaderTimes] = field(default_factory=lambda: defaultdict(LoaderTimes))
    attentions: dict[tuple[int, int], partial[torch.Tensor]] = field(default_factory=dict)
    code: list[FunctionCode] = field(default_factory=list)
    in_anomaly_mode: bool = False
    _inside: bool = False
    _iterators: dict[int, int] = field(default_factory=dict)

    def nodes(self, *kinds: type[N]) -> Iterator[tuple[FunctionCode, N]]:
        """Return the syntax nodes of these kinds in all code that ran."""
        return ((one, node) for one in self.code for node in one.nodes(*kinds))

    def code_calls(self, *names: str) -> Iterator[tuple[FunctionCode, ast.Call]]:
        """Return calls of names with one of these dotted ends: `tensor` finds `torch.tensor`."""
        return (found for found in self.nodes(ast.Call) if is_called(found[1], *names))

    def on_module(
        self, original: Original, module: torch.nn.Module, *args: Any, **kwargs: Any
    ) -> Any:
        self.times[type(module)] += 1
        if self._inside:
            return original(module, *args, **kwargs)
        self.in_anomaly_mode |= torch.is_anomaly_enabled()
        versions = tuple(map(version, (*tensors_in((args, kwargs)), *module.parameters())))
        training = getattr(module, "training", False)  # a frozen TorchScript module has none
        seen = ObservedModelCall(module, args, kwargs, self.steps, training, versions)
        self.calls.append(seen)
        self._inside = True
        try:
            result = original(module, *args, **kwargs)
        finally:
            self._inside = False
        given = vars(result) if hasattr(result, "__dataclass_fields__") else result
        seen.has_graph = any(one.requires_grad for one in tensors_in(given))
        return result

    def on_backward(
        self, original: Original, tensors: Any, given: Any = None, retain_graph: Any = None,
        create_graph: bool = False, *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        self.backwards.append((bool(retain_graph), create_graph))
        return original(tensors, given, retain_graph, create_graph, *args, **kwargs)

    def on_grad(self, original: Original, *args: Any, **kwargs: Any) -> Any:
        self.gradients_asked = True
        return original(*args, **kwargs)

    def on_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.steps += 1
        self.held |= {id(one) for group in optimizer.param_groups for one in group["params"]}

    def on_attention(
        self, original: Original, query: Any, key: Any, value: Any, attn_mask: Any = None,
        dropout_p: float = 0.0, is_causal: bool = False, *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        # Four masks are kept at most: their queries, keys and values may be large.
        if attn_mask is not None and len(self.attentions) < 4:
            given = (one.detach() for one in (query, key, value))
            named = {"dropout_p": dropout_p, **kwargs}
            self.attentions.setdefault(
                (id(attn_mask), version(attn_mask)), partial(original, *given, attn_mask, **named)
            )
        return original(query, key, value, attn_mask, dropout_p, is_causal, *args, **kwargs)

    def on_loop(self, original: Original, loader: DataLoader[Any]) -> Any:
        begun_s = clock.now()
        self.loaders[id(loader)] = loader
        iterator = original(loader)
        self.draws[id(loader)].begun_s.append(clock.now() - begun_s)
        self._iterators[id(iterator)] = id(loader)
        return iterator

    def on_draw(self, original: Original, iterator: Any) -> Any:
        begun_s, draws = clock.now(), self.draws[self._iterators.get(id(iterator), 0)]
        try:
            batch = original(iterator)
        except StopIteration:
            draws.ended_s.append(clock.now() - begun_s)
            raise
        draws.next_s.append(clock.now() - begun_s)
        return batch


def observed(
    call: Callable[[], object], parameters: Sequence[torch.nn.Parameter] = ()
) -> ObservedCall:
    """Make the call and observe it; `parameters` belong to the step's models."""

    def gradients() -> dict[int, tuple[int, int] | None]:
        """Return a value for each parameter that changes with a write to its gradient."""
        # A step may have made a parameter the result of an operation, by mistake.
        given = ((id(one), one.grad) for one in parameters if one.is_leaf)
        return {one: None if grad is None else (id(grad), version(grad)) for one, grad in given}

    found, before = ObservedCall(), gradients()
    with ExitStack() as stack:
        for owner, name, see in (
            (torch.nn.Module, "__call__", found.on_module),
            (torch.autograd, "backward", found.on_backward),
            (torch.autograd, "grad", found.on_grad),
            (torch.nn.functional, "scaled_dot_product_attention", found.on_attention),
            (DataLoader, "__iter__", found.on_loop),
            (loader_iterator(), "__next__", found.on_draw),
        ):
            stack.enter_context(patched(owner, name, partial(partial, see)))
        stack.enter_context(optimizer_hooks(after=found.on_step))
        ran = _executed(call)
    found.code = code_of(ran)
    after = gradients().items()
    found.got_gradients = {one for one, now in after if now not in (None, before.get(one))}
    return found


def _executed(call: Callable[[], object]) -> set[CodeType]:
    """Make the call; return the user's functions that ran, or none under another profiler."""
    ran = set[CodeType]()
    if sys.getprofile() is not None:
        call()
        return ran

    def listen(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and is_users(frame.f_code.co_filename):
            ran.add(frame.f_code)

    sys.setprofile(listen)
    try:
        call()
    finally:
        sys.setprofile(None)
    return ran


@dataclass(frozen=True)
class FunctionCode:
    """The syntax tree of one function, or of a cell without its functions."""

    code: CodeType
    tree: ast.AST

    def nodes(self, *kinds: type[N]) -> Iterator[N]:
        """Yield the nodes of these kinds outside of inner functions and classes."""
        waiting = list(ast.iter_child_nodes(self.tree))
        while waiting:
            node = waiting.pop(0)
            if isinstance(node, kinds):
                yield node
            if not isinstance(node, Function | ast.ClassDef):
                waiting += ast.iter_child_nodes(node)

    @cached_property
    def _parents(self) -> dict[int, ast.AST]:
        around = ast.walk(self.tree)
        return {id(child): node for node in around for child in ast.iter_child_nodes(node)}

    def statement(self, node: ast.AST) -> ast.AST:
        """Return the statement around a node."""
        while not isinstance(node, ast.stmt) and id(node) in self._parents:
            node = self._parents[id(node)]
        return node

    def spots(self, node: ast.AST) -> tuple[Spot, ...]:
        """Return the lines of a node."""
        first = getattr(node, "lineno", 0)
        last = getattr(node, "end_lineno", None) or first
        return tuple(Spot(self.code.co_filename, at) for at in range(first, last + 1))


def code_of(ran: Iterable[CodeType]) -> list[FunctionCode]:
    """Return the syntax trees of functions whose source is known, by file and line."""
    trees: dict[str, ast.Module | None] = {}
    found = []
    for code in sorted(ran, key=lambda one: (one.co_filename, one.co_firstlineno, one.co_name)):
        file = code.co_filename
        if file not in trees:
            trees[file] = None
            with suppress(SyntaxError, ValueError, RecursionError):
                trees[file] = ast.parse("".join(linecache.getlines(file)))
        if (tree := _tree(trees[file], code)) is not None:
            found.append(FunctionCode(code, tree))
    return found


def _tree(module: ast.Module | None, code: CodeType) -> ast.AST | None:
    """Return the function that was compiled to this code; comprehensions are part of another."""
    if module is None or code.co_name == "<module>":
        return module
    for node in ast.walk(module):
        if isinstance(node, Function) and node.name == code.co_name:
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            if code.co_firstlineno in (first, node.lineno):
                return node
    return None


def is_called(node: ast.AST, *names: str) -> bool:
    """Return whether a node calls a name with one of these dotted ends."""
    if not isinstance(node, ast.Call):
        return False
    called = dotted(node.func)
    return any(called == name or called.endswith(f".{name}") for name in names)


def dotted(node: ast.AST) -> str:
    """Return `torch.nn.functional.softmax`, with `?` for each expression that is no name."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else "?"

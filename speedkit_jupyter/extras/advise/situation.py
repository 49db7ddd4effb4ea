"""The input of the rules: an observed call of the step, and the step's times and objects."""

from __future__ import annotations

import ast
import linecache
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

from speedkit_jupyter.extras.advise.advice import Opportunity, Subject
from speedkit_jupyter.extras.profile.profile import Part, Profile
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.support.source_lines import Spot, is_users
from speedkit_jupyter.torchglue.confinement import optimizer_hooks, patched
from speedkit_jupyter.torchglue.modules import loader_iterator
from speedkit_jupyter.torchglue.private import tree_map, version
from speedkit_jupyter.torchglue.storage import tensors_in

N = TypeVar("N", bound=ast.AST)
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Original = Callable[..., Any]
# Parts of a step that count as a line's own work, not as a model's or an optimizer's.
OF_LINES: frozenset[Part] = frozenset(["rest", "data", "synchronizations", "host to device"])


@dataclass
class ObservedModelCall:
    """A call of a module outside other modules; `step` is the number of optimizer steps before."""

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    step: int
    training: bool
    has_graph: bool = False

    def __call__(self) -> object:
        return self.module(*self.args, **self.kwargs)

    @property
    def inputs(self) -> list[torch.Tensor]:
        return tensors_in((self.args, self.kwargs))

    def with_rows(self, times: int) -> ObservedModelCall:
        """Return a call with all rows repeated; if an input is 0-D or 1-D, each input is a row."""
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
    """Waiting times for a loader: `next_s` has the seconds for each batch, `waited_s` the total."""

    loader: DataLoader[Any]
    loops: int = 0
    next_s: list[float] = field(default_factory=list)
    waited_s: float = 0.0


@dataclass
class ObservedCall:
    """The module calls, optimizer steps and loader waits that were seen in one call of the step.

    `draws` has the waits by the loader's id. `held` has the ids of parameters whose optimizer
    stepped, and `got_gradients` the ids of parameters with new gradients.
    """

    calls: list[ObservedModelCall] = field(default_factory=list)
    has_backward: bool = False
    held: set[int] = field(default_factory=set)
    got_gradients: set[int] = field(default_factory=set)
    steps: int = 0
    draws: dict[int, LoaderTimes] = field(default_factory=dict)
    code: list[FunctionCode] = field(default_factory=list)
    in_anomaly_mode: bool = False
    _inside: bool = False
    _iterators: dict[int, LoaderTimes] = field(default_factory=dict)

    def nodes(self, *kinds: type[N]) -> Iterator[tuple[FunctionCode, N]]:
        return ((one, node) for one in self.code for node in one.nodes(*kinds))

    def on_module(self, original: Original, module: Any, /, *args: Any, **kwargs: Any) -> Any:
        if self._inside:
            return original(module, *args, **kwargs)
        self.in_anomaly_mode |= torch.is_anomaly_enabled()
        training = getattr(module, "training", False)  # frozen TorchScript modules lack `training`
        seen = ObservedModelCall(module, args, kwargs, self.steps, training)
        self.calls.append(seen)
        self._inside = True
        try:
            result = original(module, *args, **kwargs)
        finally:
            self._inside = False
        given = vars(result) if hasattr(result, "__dataclass_fields__") else result
        seen.has_graph = any(one.requires_grad for one in tensors_in(given))
        return result

    def on_backward(self, original: Original, *args: Any, **kwargs: Any) -> Any:
        self.has_backward = True
        return original(*args, **kwargs)

    def on_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.steps += 1
        self.held |= {id(one) for group in optimizer.param_groups for one in group["params"]}

    def on_loop(self, original: Original, loader: DataLoader[Any]) -> Any:
        begun_s, draws = clock.now(), self.draws.setdefault(id(loader), LoaderTimes(loader))
        iterator = original(loader)
        draws.loops += 1
        draws.waited_s += clock.now() - begun_s
        self._iterators[id(iterator)] = draws
        return iterator

    def on_draw(self, original: Original, iterator: Any) -> Any:
        if (draws := self._iterators.get(id(iterator))) is None:  # the loop began before the step
            return original(iterator)
        begun_s = clock.now()
        try:
            batch = original(iterator)
            draws.next_s.append(clock.now() - begun_s)
            return batch
        finally:
            draws.waited_s += clock.now() - begun_s


def observed(call: Callable[[], object], parameters: Sequence[Any] = ()) -> ObservedCall:
    """Run `call`, and return its observations. Only `parameters` are checked for new gradients."""

    def gradients() -> dict[int, tuple[int, int] | None]:
        """Return each gradient's id and version by parameter id; None for a missing gradient."""
        # A step may replace a parameter with a non-leaf tensor; reading the tensor's `grad` warns.
        given = ((id(one), one.grad) for one in parameters if one.is_leaf)
        return {one: None if grad is None else (id(grad), version(grad)) for one, grad in given}

    found, before = ObservedCall(), gradients()
    with ExitStack() as stack:
        for owner, name, see in (
            (torch.nn.Module, "__call__", found.on_module),
            (torch.autograd, "backward", found.on_backward),
            (torch.autograd, "grad", found.on_backward),
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


def _executed(call: Callable[[], object]) -> Counter[CodeType]:
    """Run `call`; return call counts of the user's functions, empty if a profiler is active."""
    ran = Counter[CodeType]()
    if sys.getprofile() is not None:
        call()
        return ran

    def listen(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and is_users(frame.f_code.co_filename):
            ran[frame.f_code] += 1

    sys.setprofile(listen)
    try:
        call()
    finally:
        sys.setprofile(None)
    return ran


@dataclass(frozen=True)
class FunctionCode:
    """The syntax tree of a function or cell; `nodes` does not enter definitions inside it."""

    code: CodeType
    tree: ast.AST
    calls: int = 1

    def nodes(self, *kinds: type[N]) -> Iterator[N]:
        def inside(around: ast.AST) -> Iterator[N]:
            for node in ast.iter_child_nodes(around):
                if isinstance(node, kinds):
                    yield node
                if not isinstance(node, Function | ast.ClassDef):
                    yield from inside(node)

        return inside(self.tree)

    def lines_of(self, node: ast.AST) -> tuple[Spot, ...]:
        first = getattr(node, "lineno", 0)
        last = getattr(node, "end_lineno", None) or first
        return tuple(Spot(self.code.co_filename, at) for at in range(first, last + 1))


def code_of(ran: Mapping[CodeType, int]) -> list[FunctionCode]:
    """Return a FunctionCode for each function or cell with known source, sorted by file and line.

    Comprehensions are part of the functions around them.
    """
    trees: dict[tuple[str, str, int], ast.AST] = {}
    for file in {code.co_filename for code in ran}:
        with suppress(SyntaxError, ValueError, RecursionError):
            module = ast.parse("".join(linecache.getlines(file)))
            trees[file, "<module>", 0] = module
            for node in ast.walk(module):
                if isinstance(node, Function):  # functions begin at their decorators
                    first = min(n.lineno for n in (node, *getattr(node, "decorator_list", ())))
                    trees[file, getattr(node, "name", "<lambda>"), first] = node
    found = []
    for code in sorted(ran, key=lambda one: (one.co_filename, one.co_firstlineno, one.co_name)):
        first = 0 if code.co_name == "<module>" else code.co_firstlineno
        if tree := trees.get((code.co_filename, code.co_name, first)):
            found.append(FunctionCode(code, tree, ran[code]))
    return found


def is_called(node: ast.AST, *names: str) -> bool:
    """Return whether a node calls one of these names, or a dotted name that ends with one."""
    if not isinstance(node, ast.Call):
        return False
    called = dotted(node.func)
    return any(called == name or called.endswith(f".{name}") for name in names)


def dotted(node: ast.AST) -> str:
    """Return a dotted name like `torch.nn.functional.softmax`; `?` replaces other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else "?"


@dataclass
class Situation:
    """The objects and measurements that a rule examines.

    `names` has the user's expressions for modules and loaders, by object id. `settle` restores the
    state. `trial_s` limits the seconds of `ratio`. `found` has the opportunities of earlier rules.
    """

    profile: Profile
    observed: ObservedCall
    cores: int
    device: torch.device
    subject: Subject
    names: Mapping[int, str] = field(default_factory=dict)
    settle: Callable[[], object] = lambda: None
    trial_s: float = math.inf
    found: list[Opportunity] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.step_s, self.steps = self.profile.step_s, self.profile.steps
        self.on_cpu = self.device.type == "cpu"
        # Only modules with parameters: no loss functions or activations.
        self.calls = [one for one in self.observed.calls if [*one.module.parameters()]]
        self.held = self.subject.held | self.observed.held  # includes optimizers made in the step

    def share(self, *parts: Part) -> float:
        return sum(self.profile.share(part) for part in parts)

    @property
    def computing(self) -> float:
        return self.share("forward", "backward")

    def line_share(self, code: FunctionCode, node: ast.AST) -> float:
        """Return the share of the step that a node's lines and their library calls take.

        Time in models, in optimizers and in other lines of the user is excluded.
        """
        spots = set(code.lines_of(node))
        own = self.profile.lines.own.items()
        return sum(share for (spot, where), share in own if spot in spots and where in OF_LINES)

    def operators(self, *names: str) -> float:
        """Return the time share of operators whose names begin with one of `names`; 0 if none."""
        found = [] if self.profile.costs is None else self.profile.costs.operators
        return sum(one.share for one in found if one.name.startswith(names))

    def name(self, value: Any, otherwise: str) -> str:
        return self.names.get(id(value)) or otherwise

    def ratio(self, first: Callable[[], object], second: Callable[[], object]) -> float:
        """Return `first`'s time ÷ `second`'s time, under no_grad; 0 if the first pair fails.

        The first pair warms up: up to five more pairs, within `trial_s` seconds, replace its times.
        """
        pairs, begun_s = list[list[float]](), clock.now()
        with suppress(Exception), torch.no_grad():  # the model may refuse another number of rows
            while not pairs or (len(pairs) <= 5 and clock.now() - begun_s < self.trial_s):
                pairs.append([clock.timed(call, self.device) for call in (first, second)])
        self.settle()
        first_s, second_s = zip(*(pairs[1:] or pairs or [[0.0, 1.0]]), strict=True)
        return float(median(first_s) / median(second_s))

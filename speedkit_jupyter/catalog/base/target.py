"""The target of a plan (model, optimizers, the plan's state), and hooks for new optimizers."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from speedkit_jupyter.catalog.facts.model import OptimizerFacts
from speedkit_jupyter.machines import flags
from speedkit_jupyter.support.weak import Alive
from speedkit_jupyter.support.wrappers import each_once, layers


@dataclass(eq=False)
class Memo:
    """The state of an applied plan until restore, even while a measurement suspends the plan."""

    autocast: str | None = None  # "bf16" or "fp16" while autocast is in force
    # SpeedContext attributes that the user's code has used: `autocast`, `grad_scaler`.
    asked: set[str] = field(default_factory=set)
    outside: int = 0  # number of calls under the user's own autocast, not `ctx.autocast()`
    scales: bool = False  # True while the plan scales losses
    scaler: Any = None  # the plan's GradScaler
    compiled_call: Any = None  # the plan's CompiledCode
    graphed: Any = None  # the plan's Graphed wrapper, which replays a CUDA graph
    # For each layer, fingerprints of the original weights, and the quantized weight or layer.
    quantized: MutableMapping[Any, Any] = field(default_factory=weakref.WeakKeyDictionary)
    # For each convolution, whether views shared the weight's memory before the plan.
    followed: MutableMapping[Any, bool] = field(default_factory=weakref.WeakKeyDictionary)
    preexisting: weakref.WeakSet[Any] | None = None  # optimizers that existed before the plan
    # Facts of the optimizers that were created under the plan and switched to fused kernels.
    met_later: MutableMapping[Any, Any] = field(default_factory=weakref.WeakKeyDictionary)

    def let_go(self) -> None:
        """Stop the compile process, if any; drop compiled code, CUDA graphs, quantized weights."""
        if self.compiled_call is not None:
            self.compiled_call.end()
        self.compiled_call = self.graphed = None
        self.quantized.clear()


class Target:
    """The model and the unwrapped optimizers of a plan, by weak references.

    Attributes:
        notes: results for the report, by optimization.
        declined: reasons why applying changed nothing, by optimization.
        kept: flags that the user changed under the plan, and that were not restored.
        search: whether to find optimizers that were not passed; False in a benchmark.
        made: the facts of optimizers that a benchmark's step creates.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        search: bool = True,
        made: tuple[OptimizerFacts, ...] = (),
    ) -> None:
        self._layers = [weakref.ref(layer) for layer in layers(model)]
        self.optimizers: Sequence[torch.optim.Optimizer] = Alive(each_once(optimizers))
        self.memo, self.search, self.made = Memo(), search, made
        self.notes, self.declined, self.kept = dict[str, str](), dict[str, str](), list[str]()
        self.remember = False  # True while found optimizers are remembered
        self._found: list[torch.optim.Optimizer] | None = None

    @property
    def model(self) -> torch.nn.Module:
        """Return the model, or the model inside its deleted wrapper; None if neither exists."""
        alive = (reference() for reference in self._layers)
        return next((one for one in alive if one is not None), cast("torch.nn.Module", None))

    @property
    def only_in(self) -> int | None:
        """Return this thread's id in a benchmark, whose plan acts in one thread only; else None."""
        return None if self.search else threading.get_ident()

    @contextmanager
    def searched_once(self) -> Iterator[None]:
        """Let `live_optimizers` search only once in the block, which must not create optimizers."""
        outer, self.remember = self.remember, True
        try:
            yield
        finally:
            if not outer:
                self.forget()

    def forget(self) -> None:
        """Forget the found optimizers, so that `live_optimizers` searches again."""
        self.remember, self._found = False, None

    def live_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return optimizers with parameters of the model; in a benchmark, only passed optimizers.

        The garbage collector finds optimizers that were not passed, in 60 ms for 450,000 objects.
        """
        if self._found is not None:
            return list(self._found)
        found = [*self.optimizers]
        if self.search:
            found = self.holders(each_once([*found, *_optimizers_of_the_process()]))
        self._found = found if self.remember else None
        return found

    def holders(self, optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
        """Return the optimizers that hold a parameter of the model; none for a deleted model."""
        own = set() if self.model is None else {id(p) for p in self.model.parameters()}
        groups = [(one, group["params"]) for one in optimizers for group in one.param_groups]
        return each_once(one for one, group in groups if any(id(p) in own for p in group))


def _optimizers_of_the_process() -> list[torch.optim.Optimizer]:
    def with_subclasses(kind: type) -> set[type]:
        return {kind}.union(*map(with_subclasses, kind.__subclasses__()))

    # Compare `type()`: isinstance() would evaluate the `__class__` of proxies and lazy modules. The
    # garbage collector finds the instances of a class faster than a loop over all objects.
    kinds = with_subclasses(torch.optim.Optimizer)
    return [one for one in gc.get_referrers(*kinds) if type(one) in kinds]


@contextmanager
def overridden(target: Target, names: Iterable[str], change: Callable[[], None]) -> Iterator[None]:
    """Set flags by `change()` in the block, then restore all but user-changed flags (`kept`)."""
    layer = flags.OVERRIDES.push(names, change)
    try:
        yield
    finally:
        target.kept.extend(flags.OVERRIDES.pop(layer))


@contextmanager
def newcomers(
    target: Target,
    known: Iterable[torch.optim.Optimizer],
    welcome: Callable[[torch.optim.Optimizer], None],
) -> Iterator[None]:
    """Call `welcome` in the block with each optimizer of the model that is not in `known`.

    `welcome` runs before the optimizer's first step, and must not keep the model alive. In a
    benchmark, `welcome` runs only in this thread, and only if `target.made` is not empty.
    """
    if not target.search and not target.made:
        yield
        return
    here, reference, members = target.only_in, weakref.ref(target), weakref.WeakSet(known)
    of_others: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if here not in (None, threading.get_ident()):
            return
        count = len(optimizer.param_groups)
        if optimizer in members or of_others.get(optimizer) == count:
            return
        target = reference()
        if target is None or not target.holders([optimizer]):
            of_others[optimizer] = count  # checked again when its number of groups changes
            return
        members.add(optimizer)
        welcome(optimizer)

    handle = register_optimizer_step_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()

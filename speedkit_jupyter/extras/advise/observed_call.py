"""One call of a step, watched: which modules it calls with what, what it draws, how it steps."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import DataLoader

from speedkit_jupyter.extras.advise.code import what_ran
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.torchglue.confinement import optimizer_hooks, patched
from speedkit_jupyter.torchglue.modules import loader_iterator
from speedkit_jupyter.torchglue.private import tree_map, version
from speedkit_jupyter.torchglue.samples import tensors_in

Original = Callable[..., Any]
# The masks of attention that are kept, with the tensors that they are for.
MASKS = 4


@dataclass
class ModelCall:
    """A call of an outermost module, in the optimizer step `step`.

    `versions` are those of the input tensors when it began, and of the parameters: one that was
    written to since is another one.
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
        """Return what is equal for calls that compute the same from the same tensors."""
        inputs = tuple(map(id, self.inputs))
        return id(self.module), self.step, self.training, self.versions, inputs

    def with_rows(self, times: int) -> ModelCall:
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
class AttentionCall:
    """The first call of SDPA with this dense mask, its arguments without their graph."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor
    scale: float | None
    dropout_p: float

    def __call__(self) -> torch.Tensor:
        return functional.scaled_dot_product_attention(
            self.q, self.k, self.v, self.mask, scale=self.scale,
            enable_gqa=self.q.shape[-3] != self.k.shape[-3],
        )  # fmt: skip


@dataclass
class Draws:
    """Seconds of one DataLoader: until its iterator was there, for each batch, for each end."""

    begun_s: list[float] = field(default_factory=list)
    next_s: list[float] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)


@dataclass
class Watched:
    """What was seen in one call of the step.

    `calls` are those of outermost modules, `times` how often modules of each class were called;
    `got_gradients` are ids of parameters whose gradient was written to; `gradients_asked` says
    whether `torch.autograd.grad` was called; each of `backwards` whether a call of `backward`
    retains and creates a graph; `attentions` are calls of SDPA with a mask, one for each mask.
    `steps` are those of all optimizers, `held` the ids of what these hold. Optimizers and `loaders`
    may be made in the step itself.
    """

    calls: list[ModelCall] = field(default_factory=list)
    times: Counter[type] = field(default_factory=Counter)
    backwards: list[tuple[bool, bool]] = field(default_factory=list)
    gradients_asked: bool = False
    held: set[int] = field(default_factory=set)
    got_gradients: set[int] = field(default_factory=set)
    steps: int = 0
    loaders: dict[int, DataLoader[Any]] = field(default_factory=dict)
    draws: dict[int, Draws] = field(default_factory=lambda: defaultdict(Draws))
    attentions: dict[tuple[int, int], AttentionCall] = field(default_factory=dict)
    ran: set[CodeType] = field(default_factory=set)
    in_anomaly_mode: bool = False
    _inside: bool = False
    _iterators: dict[int, int] = field(default_factory=dict)

    def module(self, original: Original, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.times[type(module)] += 1
        if self._inside:
            return original(module, *args, **kwargs)
        self.in_anomaly_mode |= torch.is_anomaly_enabled()
        versions = tuple(map(version, (*tensors_in((args, kwargs)), *module.parameters())))
        training = getattr(module, "training", False)  # a frozen TorchScript module has none
        seen = ModelCall(module, args, kwargs, self.steps, training, versions)
        self.calls.append(seen)
        self._inside = True
        try:
            result = original(module, *args, **kwargs)
        finally:
            self._inside = False
        given = vars(result) if hasattr(result, "__dataclass_fields__") else result
        seen.has_graph = any(one.requires_grad for one in tensors_in(given))
        return result

    def backward(
        self, original: Original, tensors: Any, given: Any = None, retain_graph: Any = None,
        create_graph: bool = False, *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        self.backwards.append((bool(retain_graph), create_graph))
        return original(tensors, given, retain_graph, create_graph, *args, **kwargs)

    def grad(self, original: Original, *args: Any, **kwargs: Any) -> Any:
        self.gradients_asked = True
        return original(*args, **kwargs)

    def stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.steps += 1
        self.held |= {id(one) for group in optimizer.param_groups for one in group["params"]}

    def attention(
        self, original: Original, query: Any, key: Any, value: Any, attn_mask: Any = None,
        dropout_p: float = 0.0, is_causal: bool = False, *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """See SDPA called; of masks the first few."""
        if attn_mask is not None and len(self.attentions) < MASKS:
            q, k, v = (one.detach() for one in (query, key, value))
            seen = AttentionCall(q, k, v, attn_mask, kwargs.get("scale"), dropout_p)
            self.attentions.setdefault((id(attn_mask), version(attn_mask)), seen)
        return original(query, key, value, attn_mask, dropout_p, is_causal, *args, **kwargs)

    def loop(self, original: Original, loader: DataLoader[Any]) -> Any:
        begun_s = clock.now()
        self.loaders[id(loader)] = loader
        iterator = original(loader)
        self.draws[id(loader)].begun_s.append(clock.now() - begun_s)
        self._iterators[id(iterator)] = id(loader)
        return iterator

    def draw(self, original: Original, iterator: Any) -> Any:
        begun_s, draws = clock.now(), self.draws[self._iterators.get(id(iterator), 0)]
        try:
            batch = original(iterator)
        except StopIteration:
            draws.ended_s.append(clock.now() - begun_s)
            raise
        draws.next_s.append(clock.now() - begun_s)
        return batch


def watched(call: Callable[[], object], parameters: Sequence[torch.nn.Parameter] = ()) -> Watched:
    """Make the call; `parameters` are those of the step's models."""

    def gradients() -> dict[int, tuple[int, int] | None]:
        """Return what changes where a gradient is written to."""
        given = ((id(one), one.grad) for one in parameters)
        return {one: None if grad is None else (id(grad), version(grad)) for one, grad in given}

    found, before = Watched(), gradients()
    with ExitStack() as stack:
        for owner, name, see in (
            (torch.nn.Module, "__call__", found.module),
            (torch.autograd, "backward", found.backward),
            (torch.autograd, "grad", found.grad),
            (torch.nn.functional, "scaled_dot_product_attention", found.attention),
            (DataLoader, "__iter__", found.loop),
            (loader_iterator(), "__next__", found.draw),
        ):
            stack.enter_context(patched(owner, name, partial(partial, see)))
        stack.enter_context(optimizer_hooks(after=found.stepped))
        found.ran = what_ran(call)
    after = gradients().items()
    found.got_gradients = {one for one, now in after if now not in (None, before[one])}
    return found

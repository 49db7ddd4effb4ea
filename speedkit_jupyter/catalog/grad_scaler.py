"""The switch `grad_scaler`: loss scaling inside the user's own loop, which stays unchanged.

Each `backward()` runs on the scaled loss and unscales the gradients at the end, so later code sees
unscaled gradients. Losses are not scaled for `create_graph=True`, or once the user's code has
scaled a loss. If a gradient overflowed, the next step of its optimizer updates nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from speedkit_jupyter.catalog.base.decision import Decision, Effect, Form, Request, Snippet, Switch
from speedkit_jupyter.catalog.base.optimization import Fields, Optimization
from speedkit_jupyter.catalog.base.target import Target
from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.catalog.model_changes.calls import graph_of
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.torchglue.confinement import optimizer_hooks, patched
from speedkit_jupyter.torchglue.modules import scaler_states
from speedkit_jupyter.torchglue.private import tree_leaves


class GradScaler(Optimization):
    """Scale the loss under fp16, where gradients may underflow; bf16 and fp32 need no scaling."""

    name = "grad_scaler"
    effect = Effect.ROUNDING
    summary = "loss scaling for fp16 training"
    helps = "fp16 training only"
    risk = "a step whose gradients overflow is skipped"
    page = "https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling"
    variable = None
    follows = True

    class Options(Fields):
        enabled: Switch = "auto"

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        asked = request.value.enabled
        unscalable = [one for one in facts.dtypes if one.startswith(("float16", "complex"))]
        if asked is not False and not facts.dtypes:
            return request.decline(False, "the model has no parameters")
        if asked is not False and unscalable:
            why = f"parameters are {unscalable[0]}: their gradients can't be scaled"
            return request.decline(False, why)
        if asked == "auto":
            if facts.precision == "fp16":
                return request.apply(True, "fp16 gradients underflow without it")
            return request.leave(False, f"{facts.precision} needs no loss scaling")
        if asked:
            return request.obey(True)
        risk = "fp16 gradients may underflow" if facts.precision == "fp16" else ""
        return request.leave(False, asked=True, hint=risk)

    @contextmanager
    def applied(self, decision: Decision, target: Target) -> Iterator[None]:
        memo = target.memo
        if memo.scaler is None:
            memo.scaler = torch.amp.GradScaler(next(iter(target.model.parameters())).device.type)
        memo.scales = True
        try:
            with scaled(target):
                yield
        finally:
            memo.scales = False

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        if form == "transformers":
            if facts.precision == "fp16" and facts.device_type != "cpu":
                return Snippet()
            raise SpeedKitError("Trainer scales the loss for fp16 on a GPU only: use --as torch")
        return Snippet(
            training=(f'scaler = torch.amp.GradScaler("{facts.device_type}")',),
            loss="scaler.scale(loss)",
            step="scaler.step({optimizer})",
            after_step=("scaler.update()",),
        )

    def observe(self, target: Target, planned: Decision | None = None) -> Mapping[str, Any]:
        return {"loss.scaled": "on" if planned or target.memo.scales else "off"}


class LossScaling:
    """Loss scaling in one thread's backward passes, while a plan with `grad_scaler` is in force.

    The first plan's scaler scales all losses. The factor is a power of two, so gradients of other
    models keep their bits unless they overflow. Once the user's code scales a loss with any
    enabled scaler, no plan scales losses in this thread until all plans have ended.
    """

    def __init__(self) -> None:
        self.targets: list[Target] = []
        self._stack = ExitStack()
        self._begin()

    def _begin(self) -> None:
        self._is_inside = self._is_users = False
        self._overflows: list[tuple[set[int], list[torch.Tensor]]] = []  # leaf ids, overflow flags
        self._held: dict[int, list[tuple[torch.Tensor, Any]]] = {}  # gradients hidden from a step
        self._unscaled: set[int] = set()  # ids of leaves that a step inside backward() unscaled
        self._holders: list[Any] = []  # stand-in optimizers, kept alive: the scaler stores ids

    def begin(self, target: Target) -> None:
        """Start scaling losses for a plan; plans may end in any order."""
        if not self.targets:
            stack = self._stack
            stack.enter_context(patched(torch.autograd, "backward", self._scaling_backward))
            stack.enter_context(patched(torch.amp.GradScaler, "scale", self._noting_scale))
            stack.enter_context(optimizer_hooks(self._before_step, self._after_step))
        self.targets.append(target)

    def end(self, target: Target) -> None:
        """Stop scaling losses for this plan."""
        self.targets.remove(target)
        if not self.targets:
            self._stack.close()
            self._begin()

    # The patches and hooks.

    def _noting_scale(self, scale: Any) -> Callable[..., Any]:
        def call(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
            is_own = not self._is_inside and scaler.is_enabled()
            self._is_users = self._is_users or is_own
            return scale(scaler, outputs)

        return call

    def _scaling_backward(self, backward: Any) -> Callable[..., Any]:
        def call(
            tensors: Any,
            grad_tensors: Any = None,
            retain_graph: Any = None,
            create_graph: bool = False,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            rest = (retain_graph, create_graph, *args)
            # With `create_graph`, gradients must not be changed in place.
            if self._is_inside or self._is_users or create_graph:
                return backward(tensors, grad_tensors, *rest, **kwargs)
            try:
                try:
                    self._is_inside = True
                    return self._scaled(backward, tensors, grad_tensors, rest, kwargs)
                finally:
                    self._is_inside = False
            finally:  # Ctrl-C may have interrupted the first line of the inner `finally`
                self._is_inside = False

        return call

    def _scaled(self, backward: Any, tensors: Any, gradients: Any, rest: Any, kwargs: Any) -> Any:
        scaler = self.targets[0].memo.scaler
        losses = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        given = [gradients] if isinstance(gradients, torch.Tensor) else gradients
        given = list(given) if given else [None] * len(losses)
        scaled = [
            scaler.scale(torch.ones_like(loss) if one is None and loss.numel() == 1 else one)
            if one is not None or loss.numel() == 1
            else None  # torch raises its own error
            for loss, one in zip(losses, given, strict=True)
        ]
        leaves = self._leaves(losses)
        before = [one.grad for one in leaves if one.grad is not None]
        self._unscaled.clear()
        with torch.no_grad():
            for gradient in before:  # the backward pass accumulates into these gradients
                gradient.mul_(scaler.get_scale())
        try:
            return backward(losses, scaled, *rest, **kwargs)
        finally:
            self._unscale(scaler, [one for one in leaves if id(one) not in self._unscaled])
            if scaler_states(scaler):
                scaler.update()
            self._holders.clear()

    def _unscale(self, scaler: Any, leaves: Sequence[torch.Tensor]) -> None:
        """Unscale the leaves' gradients in place, and record whether any is not finite."""
        holders = SimpleNamespace(param_groups=[{"params": leaves}])
        if not any(one.grad is not None for one in leaves):
            return
        self._holders.append(holders)
        scaler.unscale_(holders)
        found = scaler_states(scaler)[id(holders)]["found_inf_per_device"]
        copies = [one.clone() for one in found.values()]
        self._overflows.append(({id(one) for one in leaves}, copies))
        del self._overflows[:-KEPT]

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Hide all of the optimizer's gradients for one step if any overflowed."""
        if self._is_users or not self.targets:
            return
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        if self._is_inside:  # a gradient hook steps the optimizer in the backward pass
            scaler = self.targets[0].memo.scaler
            self._unscale(scaler, [one for one in parameters if id(one) not in self._unscaled])
            self._unscaled |= set(map(id, parameters))
        ids = set(map(id, parameters))
        mine = [found for leaves, found in self._overflows if leaves & ids]
        rest = ((leaves - ids, found) for leaves, found in self._overflows)
        self._overflows = [pair for pair in rest if pair[0]]  # for other optimizers
        if any(float(one) for found in mine for one in found):
            self._held[id(optimizer)] = [(one, one.grad) for one in parameters]
            for one in parameters:
                one.grad = None

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for parameter, gradient in self._held.pop(id(optimizer), ()):
            parameter.grad = gradient

    def _leaves(self, losses: Iterable[Any]) -> list[torch.Tensor]:
        """Return the leaf tensors that may receive gradients of the losses."""
        leaves = (getattr(node, "variable", None) for node in graph_of(tree_leaves(losses)))
        found = {id(leaf): leaf for leaf in leaves if leaf is not None}
        for target in self.targets:  # reentrant checkpoints hide their parameters from the graph
            model = target.model
            found |= {id(one): one for one in (() if model is None else model.parameters())}
        return [*found.values()]


# Largest number of overflow records that wait for their optimizers' next steps.
KEPT = 64


class ThreadLossScaling(threading.local):
    """Thread-local storage: each thread has its own LossScaling."""

    def __init__(self) -> None:
        self.here = LossScaling()


IN_THREAD = ThreadLossScaling()


@contextmanager
def scaled(target: Target) -> Iterator[None]:
    """Scale this thread's losses in the block."""
    loop = IN_THREAD.here
    loop.begin(target)
    try:
        yield
    finally:
        loop.end(target)

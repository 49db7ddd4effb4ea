"""The switch `inference`: calls of the model without autograd, for prediction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.autograd import grad  # by name, because patches replace `torch.autograd.grad`

from speedkit_jupyter.catalog.base.decision import Decision, Effect, Form, Request, Snippet, Switch
from speedkit_jupyter.catalog.base.optimization import Optimization
from speedkit_jupyter.catalog.base.target import Target
from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.catalog.model_changes.calls import HOOKS, Call, around, graph_of
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.torchglue import private as torch_private
from speedkit_jupyter.torchglue.modules import buffer_table, module_table, parameter_table
from speedkit_jupyter.torchglue.private import version

ASKED = "an input asks for its gradient, so calls are recorded as usual"
TRAINING = "the model is in training mode by now, so calls are recorded as usual: model.eval()"
HOOKED = "hooks see parts of the model, so calls are recorded as usual"
OTHERS = (
    "a call changes the model, draws random numbers, computes with other tensors, or returns "
    "objects, so calls are recorded as usual"
)
PLAIN = (torch.Tensor, torch.nn.Parameter, str, int, float, bool, type(None))


class Inference(Optimization):
    """Run calls of a model in eval mode without autograd. SpeedKit never sets eval mode itself."""

    name = "inference"
    effect = Effect.ROUNDING  # without autograd, torch uses other kernels for some layers
    summary = "calls of the model without autograd's records"
    helps = "prediction by code without torch.no_grad()"
    risk = "a backward pass through the results repeats the call, which takes longer"
    page = "https://docs.pytorch.org/docs/stable/generated/torch.no_grad.html"
    refusal = "a model whose calls record nothing under `inference`"
    Options = Switch

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        offer = "the model is in eval mode; it is there on request"
        return request.on_request(_obstacle(facts), offer)

    def calls(self, decision: Decision, target: Target) -> list[Call]:
        if not decision.value:
            return []
        return [Unrecorded(target.model, target.notes, target.only_in)]

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        """Return `model.eval()` and `torch.no_grad()` as code. Raises SpeedKitError for Trainer."""
        if form == "transformers":
            raise SpeedKitError("Trainer trains, and inference does not: use --as torch")
        return Snippet(model=("model.eval()",), forward=("torch.no_grad()",))

    def observe(self, target: Target, planned: Decision | None = None) -> Mapping[str, Any]:
        is_on = bool(planned.value) if planned else around(target.model, Unrecorded)
        return {"model.inference": is_on}

    def candidates(self, hardware: Hardware, facts: Facts) -> tuple[Any, ...]:
        return () if _obstacle(facts) else (True,)


def _obstacle(facts: Facts) -> str:
    if facts.optimizers:
        names = ", ".join(dict.fromkeys(optimizer.name for optimizer in facts.optimizers))
        return f"the step trains: {names} holds the model's parameters"
    if facts.compiled != "no":
        return "the model is compiled already: put torch.no_grad() around your own call"
    if facts.lazy:
        return "lazy layers have no shape yet: run one forward pass before"
    if facts.frozen:
        return "no parameter requires gradients, so calls record nothing anyway"
    if facts.training:
        return "the model is in training mode, where it computes something else: model.eval()"
    return ""


class Unrecorded(Call):
    """A wrapper that runs calls without autograd; a backward pass repeats the call with autograd.

    Autograd stays on in training mode, with hooks, and for inputs that require gradients. It also
    stays on until a call has no side effects, random numbers or other trained tensors.
    """

    # Ids of the trained parameters, the results' structure, and each result's `requires_grad`.
    known: tuple[list[int], Any, list[bool]] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = partial(self.below, *args, **kwargs)
        if not self.acts() or not torch.is_grad_enabled() or torch_private.is_transforming():
            return call()
        parts, inputs = _parts(self.module), torch_private.tree_leaves((args, kwargs))
        every = (one for part in parts for one in parameter_table(part).values())
        trained = {id(one): one for one in every if one is not None and one.requires_grad}
        hooks = (getattr(part, kind) for part in parts for kind in HOOKS)
        own_hooks = (getattr(one, torch_private.TENSOR_HOOKS[0], None) for one in trained.values())
        why = ASKED if any(map(_asks, inputs)) else HOOKED if any((*hooks, *own_hooks)) else ""
        if why := TRAINING if any(part.training for part in parts) else why:
            self.notes["inference"] = why
        if why or not trained:
            return call()
        if self.known is not None and self.known[0] == [*trained]:
            buffers = (buffer for part in parts for buffer in buffer_table(part).values())
            read = [one for one in (*inputs, *buffers) if isinstance(one, torch.Tensor)]
            forms: list[Any] = []
            results = Recalled.apply(call, parts, read, self.known[2], forms, *trained.values())
            if forms == [self.known[1]]:
                return torch_private.tree_unflatten(results, forms[0])
        return self._recorded(call, parts, trained)

    def _recorded(
        self, call: Callable[[], Any], parts: Sequence[Any], trained: Mapping[int, torch.Tensor]
    ) -> Any:
        """Return the result of a call with autograd; decide whether later calls need autograd."""
        device = next(iter(trained.values())).device
        before, random = _state(parts), _generators(device)
        result = call()
        leaves, form = torch_private.tree_flatten(result)
        is_same = _same(before, _state(parts))
        draws = not all(map(torch.equal, random, _generators(device)))
        bases = [id(torch_private.base_of(one)) for one in leaves if _asks(one)]
        is_plain = all(type(one) in PLAIN for one in leaves) and len({*bases}) == len(bases)
        if is_same and not draws and is_plain and _variables(leaves) <= trained.keys():
            self.known = [*trained], form, [*map(_asks, leaves)]
            self.notes.pop("inference", None)
        else:
            self.known, self.notes["inference"] = None, OTHERS
        return result


class Recalled(torch.autograd.Function):
    """A call without autograd; its backward pass repeats the call with autograd."""

    @staticmethod
    def forward(
        ctx: Any, call: Any, parts: Any, read: Any, asking: Any, forms: Any, *trained: Any
    ) -> Any:
        leaves, form = torch_private.tree_flatten(call())
        forms.append(form)
        ctx.call, ctx.parts = call, parts
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*trained, *read)  # backward() fails if a saved tensor was modified
        device, ctx.autocast = trained[0].device.type, nullcontext
        if torch.amp.is_autocast_available(device):
            lowered, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
            ctx.autocast = partial(torch.autocast, device, dtype, lowered)
            if lowered:  # cached low-precision copies of parameters have no graph
                torch.clear_autocast_cache()
        pairs = [*zip(leaves, asking, strict=False)]
        others = (one for one, asks in pairs if not asks)
        ctx.mark_non_differentiable(*(one for one in others if isinstance(one, torch.Tensor)))
        # Views are cloned: the user could not modify a view from a custom function in place.
        return tuple(
            one.clone() if asks and torch_private.base_of(one) is not one else one
            for one, asks in pairs
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        trained = ctx.saved_tensors[: len(ctx.needs_input_grad) - 5]
        training = [part for part in ctx.parts if part.training]
        try:
            for part in training:
                part.training = False
            with torch.enable_grad(), ctx.autocast():
                leaves = torch_private.tree_leaves(ctx.call())
        finally:
            for part in training:
                part.training = True
        pairs = [pair for pair in zip(leaves, gradients, strict=True) if pair[1] is not None]
        results, given = zip(*pairs, strict=True)
        asking = tuple(one for one in trained if one.requires_grad)
        options = {"allow_unused": True, "create_graph": torch.is_grad_enabled()}
        found = dict(zip(map(id, asking), grad(results, asking, given, **options), strict=True))
        return None, None, None, None, None, *(found.get(id(one)) for one in trained)


def _asks(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _parts(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the module and all submodules, faster than `modules()`."""
    parts = [module]
    for part in parts:
        parts += [child for child in module_table(part).values() if child is not None]
    return parts


def _state(parts: Sequence[torch.nn.Module]) -> list[tuple[Any, int]]:
    """Return attributes of modules and entries of their dicts and lists, with tensor versions."""
    values = [value for part in parts for value in vars(part).values()]
    values += [one for value in values if isinstance(value, dict) for one in value.values()]
    values += [one for value in values if isinstance(value, list) for one in value]
    return [(one, version(one) if isinstance(one, torch.Tensor) else 0) for one in values]


def _same(before: Sequence[tuple[Any, int]], after: Sequence[tuple[Any, int]]) -> bool:
    pairs = zip(before, after, strict=False)
    are_same = all(one is other and n == now for (one, n), (other, now) in pairs)
    return are_same and len(before) == len(after)


def _generators(device: torch.device) -> list[torch.Tensor]:
    """Return the states of the random generators for calls on a device."""
    others = [] if device.type in ("cpu", "meta") else [torch.get_device_module(device)]
    return [one.get_rng_state() for one in (torch, *others)]


def _variables(results: Sequence[Any]) -> set[int]:
    """Return ids of leaf tensors in the results' graph, and of end nodes without a leaf tensor."""
    last = (node for node in graph_of(results) if not node.next_functions)
    leaves = (one for one in results if _asks(one) and one.is_leaf)
    return {id(one) for one in (*(getattr(node, "variable", node) for node in last), *leaves)}

"""Convolution weights with their channels last in memory."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.optimizations.base.decision import Decision, Effect, Request, Switch
from speedkit_jupyter.optimizations.base.late_optimizers import newcomers
from speedkit_jupyter.optimizations.base.optimization import Optimization
from speedkit_jupyter.optimizations.base.snippet import Form, Snippet
from speedkit_jupyter.optimizations.base.target import Target
from speedkit_jupyter.optimizations.facts.flattening import flattens
from speedkit_jupyter.optimizations.facts.layers import (
    channels_last_stride,
    has_channels,
    is_channels_last,
    is_convolution,
)
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.optimizations.properties.memory_layout import (
    LAYOUT,
    is_followed,
    owns_its_storage,
)
from speedkit_jupyter.optimizations.properties.wishes import MISSING, Layer, Layers

if TYPE_CHECKING:
    import torch

SHARED = "as before: other tensors (a view, a state_dict, an array) follow the weight's memory"
FLAT = "whose step flattens gradients with .view(-1), which works in the usual layout only"


class ChannelsLast(Optimization):
    """Tensor Cores and oneDNN read NHWC; activations follow the weights by themselves."""

    name = "channels_last"
    effect = Effect.ROUNDING
    summary = "convolution weights in NHWC layout"
    helps = "convolutions on Tensor Cores, and by oneDNN on CPUs"
    risk = (
        "code that asks for strides or calls view() on activations; dropout draws other masks, as "
        "it goes through memory"
    )
    undone = "weights, gradients and optimizer state have the strides that they had"
    page = "https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html"
    Options = Annotated[Switch, Field(description="auto, true, false")]

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        """On for convolutions where Tensor Cores are used; on a CPU worth measuring."""
        now = facts.convolutions > 0 and facts.channels_last == facts.convolutions
        if request.value is False:
            return request.leave(now, "the layout stays as it is", asked=True)
        if not facts.convolutions:
            return request.decline(False, "the model has no 2-D or 3-D convolution")
        if now:
            return request.leave(True, "the convolutions lie channels-last already")
        flat = [optimizer.name for optimizer in facts.optimizers if optimizer.flattens]
        if flat:
            return request.decline(False, f"{', '.join(flat)}: {FLAT}")
        if request.value is True:
            return request.obey(True, f"for {_counted(facts.convolutions)}")
        if facts.device_type == "cpu":
            reason = "oneDNN reads it without reordering, other operations may have to reorder"
            return request.offer(False, True, reason)
        gpu = hardware.accelerator(facts.device)
        if gpu is None or not gpu.tensor_cores:
            return request.leave(False, "it pays with Tensor Cores, which this device lacks")
        if facts.precision == "fp32" and not gpu.tf32:
            return request.leave(False, "Tensor Cores are idle in float32 here")
        return request.apply(
            True, f"{_counted(facts.convolutions)} on Tensor Cores, which read NHWC"
        )

    def expected(self, decision: Decision, target: Target, facts: Facts) -> Mapping[str, Any]:
        """Those that lie so already, and those that will be laid out anew."""
        convolutions = [m for m in target.model.modules() if is_convolution(m)]
        anew = {id(weight) for weight in _weights(target)}
        last = sum(is_channels_last(m) or id(m._parameters["weight"]) in anew for m in convolutions)
        return {"model.channels_last": f"{last} of {len(convolutions)} convolutions"}

    @contextmanager
    def applied(self, decision: Decision, target: Target) -> Iterator[None]:
        """Lay the weights out anew, and whatever must lie like them."""
        optimizers = target.live_optimizers()
        flat = {
            id(p) for optimizer in optimizers if flattens(optimizer) for p in _parameters(optimizer)
        }
        own = _weights(target)
        weights = [weight for weight in own if id(weight) not in flat]
        if shared := _number_of_weights(target.model) - len(own):
            target.notes[self.name] = f"{_counted(shared)} {SHARED}"
        wishes = [(weight, channels_last_stride(weight)) for weight in weights]
        replaced = _Replaced(target.model, weights)
        with ExitStack() as stack:
            stack.callback(replaced.lay_back, target)
            layer = stack.enter_context(LAYOUT.wished(wishes, target.live_optimizers))
            replaced.remember()
            for optimizer in optimizers:
                _follow_when_loaded(layer, stack, optimizer)
            stack.enter_context(replaced.watched())
            welcome = partial(_welcome, layer, target.notes, stack)
            stack.enter_context(newcomers(target, optimizers, welcome))
            yield

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        """The whole model where that moves nothing but convolutions, else each of them."""
        kinds = {4: ("2d", "channels_last"), 5: ("3d", "channels_last_3d")}
        formats = [kinds[dimensions] for dimensions in facts.convolution_dims]
        if len(formats) == 1 and not facts.others_of_such_dims:
            return Snippet(model=(f"model = model.to(memory_format=torch.{formats[0][1]})",))
        lines = ["for module in model.modules():"]
        for kind, memory_format in formats:
            classes = f"(torch.nn.Conv{kind}, torch.nn.ConvTranspose{kind})"
            lines.append(f"    if isinstance(module, {classes}):")
            lines.append(f"        module.to(memory_format=torch.{memory_format})")
        return Snippet(model=tuple(lines))

    def observe(self, target: Target) -> Mapping[str, Any]:
        """How many convolutions lie channels-last."""
        convolutions = [m for m in target.model.modules() if is_convolution(m)]
        if not convolutions:
            return {}
        last = sum(map(is_channels_last, convolutions))
        return {"model.channels_last": f"{last} of {len(convolutions)} convolutions"}

    def candidates(self, hardware: Hardware, facts: Facts) -> tuple[Any, ...]:
        """On, where there are convolutions."""
        return (True,) if facts.convolutions else ()


def _counted(convolutions: int) -> str:
    return f"{convolutions} convolution{'s' * (convolutions > 1)}"


def _number_of_weights(model: torch.nn.Module) -> int:
    return len({id(m._parameters["weight"]) for m in model.modules() if is_convolution(m)})


def _weights(target: Target) -> list[torch.nn.Parameter]:
    """The convolutions' weights, save those whose memory other tensors or processes use too.

    In a benchmark, which searches for no optimizers, it is its own copies that follow them.
    """
    model = target.model
    weights = (m._parameters["weight"] for m in model.modules() if is_convolution(m))
    users = Counter(tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers()))
    return [
        weight
        for weight in {id(w): w for w in weights if w is not None}.values()
        if users[weight.data_ptr()] == 1
        and owns_its_storage(weight)
        and not (target.search and _is_followed(weight, target))
    ]


def _is_followed(weight: torch.nn.Parameter, target: Target) -> bool:
    """As it was at first: a plan that is hidden while something is measured comes back whole."""
    from torch.utils.weak import WeakIdKeyDictionary

    if target.memo.followed is None:
        target.memo.followed = WeakIdKeyDictionary()
    if weight not in target.memo.followed:
        target.memo.followed[weight] = is_followed(weight)
    return target.memo.followed[weight]


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _welcome(
    layer: Layer, notes: dict[str, str], hooks: ExitStack, optimizer: torch.optim.Optimizer
) -> None:
    """An optimizer that was made meanwhile: its state follows, or the weights go back for it."""
    if not flattens(optimizer):
        for weight in _parameters(optimizer):
            layer.renew(weight, [optimizer])
        _follow_when_loaded(layer, hooks, optimizer)
        return
    for weight in _parameters(optimizer):
        layer.withdraw(weight)
    name = type(optimizer).__name__
    notes["channels_last"] = f"taken back before the first step of {name}, {FLAT}"


def _follow_when_loaded(layer: Layer, hooks: ExitStack, optimizer: torch.optim.Optimizer) -> None:
    """A loaded state lies as it was saved: a fused optimizer would take it for other weights'."""

    def hook(optimizer: torch.optim.Optimizer) -> None:
        for weight in _parameters(optimizer):
            layer.renew(weight, [optimizer])

    hooks.callback(optimizer.register_load_state_dict_post_hook(hook).remove)


class _Replaced:
    """What took a weight's place while the plan was in force.

    A copy of a weight that was laid out (a cast, an exponential average, a clone) lies like it,
    which is our doing and not the user's. It may have left the model again by the end: then an
    optimizer still has it.
    """

    def __init__(self, model: torch.nn.Module, weights: Sequence[torch.nn.Parameter]) -> None:
        from torch.utils.weak import WeakIdKeyDictionary

        ids = {id(weight) for weight in weights}
        self._found = [
            (weakref.ref(module), weakref.ref(weight))
            for module in model.modules()
            if is_convolution(module) and id(weight := module._parameters["weight"]) in ids
        ]
        self._layers: MutableMapping[Any, tuple[Any, Layers]] = weakref.WeakKeyDictionary()
        self._later: MutableMapping[Any, Layers] = WeakIdKeyDictionary()

    def remember(self) -> None:
        """Once the weights are laid out: what each of them comes back to."""
        for module, weight in self._found:
            if (layers := LAYOUT.layers(weight())) is not None:
                self._layers[module()] = (weight, layers)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Every tensor that is given to one of the layers as its weight is remembered.

        torch's hook is for all modules of the process: others cost one look at a dictionary.
        """
        from torch.nn.modules.module import register_module_parameter_registration_hook

        def hook(module: Any, name: str, parameter: Any) -> None:
            if name == "weight" and module in self._layers:
                self._note(module, parameter)

        handle = register_module_parameter_registration_hook(hook)
        try:
            yield
        finally:
            handle.remove()

    def lay_back(self, target: Target) -> None:
        """Those that took a weight's place, and lie as it did."""
        for module in list(self._layers):
            self._note(module, module._parameters.get("weight"))
        optimizers = target.live_optimizers() if self._later else ()
        held = {id(module._parameters.get("weight")) for module in self._layers}
        held |= {id(p) for optimizer in optimizers for p in _parameters(optimizer)}
        for weight, layers in list(self._later.items()):
            if id(weight) not in held:
                continue  # lent for a while: another model's, which may lie so by the user's wish
            wish, layout = channels_last_stride(weight), LAYOUT.original(weight)
            original = layers.original  # by now: another plan may have known better
            if layout is MISSING:
                LAYOUT.put_back(weight, original, wish, optimizers)
            elif layout.stride == wish:  # another plan found it as it lay under this one
                LAYOUT.comes_back_to(weight, original)

    def _note(self, module: torch.nn.Module, weight: torch.nn.Parameter | None) -> None:
        first, layers = self._layers[module]
        if weight is not None and has_channels(weight) and weight is not first():
            self._later[weight] = layers

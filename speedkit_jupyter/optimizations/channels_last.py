"""Convolution weights with their channels last in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from speedkit_jupyter.facts import Facts, channels_last_stride, is_channels_last, is_convolution
from speedkit_jupyter.hardware import Hardware
from speedkit_jupyter.optimizations.base import (
    Decision,
    Effect,
    Optimization,
    Request,
    Switch,
    Target,
)
from speedkit_jupyter.optimizations.layout import followers, owns_its_storage, restride
from speedkit_jupyter.optimizations.snippet import Form, Snippet

if TYPE_CHECKING:
    import torch


class ChannelsLast(Optimization):
    """Tensor Cores and oneDNN read NHWC; activations follow the weights by themselves."""

    name = "channels_last"
    effect = Effect.ROUNDING
    summary = "convolution weights in NHWC layout"
    Options = Annotated[Switch, Field(description="auto, true, false")]

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        """On for convolutions where Tensor Cores are used; on a CPU worth measuring."""
        now = facts.convolutions > 0 and facts.channels_last == facts.convolutions
        if request.value is False:
            return request.leave(now, "as asked: the layout stays as it is")
        if not facts.convolutions:
            return request.decline(False, "the model has no 2-D or 3-D convolution")
        if now:
            return request.leave(True, "the convolutions lie channels-last already")
        if request.value is True:
            return request.apply(True, f"as asked, for {facts.convolutions} convolutions")
        if facts.device_type == "cpu":
            reason = "oneDNN reads it without reordering, other operations may have to reorder"
            return request.offer(False, True, reason)
        gpu = hardware.accelerator(facts.device)
        if gpu is None or not gpu.tensor_cores:
            return request.leave(False, "it pays with Tensor Cores, which this device lacks")
        if facts.precision == "fp32" and not gpu.tf32:
            return request.leave(False, "Tensor Cores are idle in float32 here")
        return request.apply(
            True, f"{facts.convolutions} convolutions on Tensor Cores, which read NHWC"
        )

    def expected(self, decision: Decision, target: Target, facts: Facts) -> Mapping[str, Any]:
        """Those that lie so already, and those that will be laid out anew."""
        convolutions = [m for m in target.model.modules() if is_convolution(m)]
        anew = {id(weight) for weight in _weights(target.model)}
        last = sum(is_channels_last(m) or id(m._parameters["weight"]) in anew for m in convolutions)
        return {"model.channels_last": f"{last} of {len(convolutions)} convolutions"}

    @contextmanager
    def applied(self, decision: Decision, target: Target) -> Iterator[None]:
        """Lay the weights out anew, and whatever must lie like them."""
        weights = _weights(target.model)
        found: list[tuple[torch.Tensor, tuple[int, ...]]] = []
        optimizers = target.live_optimizers()

        def lay_out(tensor: torch.Tensor) -> None:
            found.append((tensor, tensor.stride()))
            restride(tensor, channels_last_stride(tensor))

        try:
            for weight in weights:
                for tensor in (weight, *followers(weight, optimizers)):
                    lay_out(tensor)
            with _following_when_loaded(weights, optimizers):
                yield
        finally:
            for tensor, stride in found:
                restride(tensor, stride)
            known = {id(tensor) for tensor, _ in found}
            optimizers = target.live_optimizers()
            for weight in weights:
                for tensor in followers(weight, optimizers):
                    if id(tensor) not in known:  # made meanwhile: like its parameter
                        restride(tensor, weight.stride())

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


def _weights(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The convolutions' weights, save those whose memory other tensors or processes use too."""
    weights = (m._parameters["weight"] for m in model.modules() if is_convolution(m))
    users = Counter(tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers()))
    return [
        weight
        for weight in {id(w): w for w in weights if w is not None}.values()
        if users[weight.data_ptr()] == 1 and owns_its_storage(weight)
    ]


@contextmanager
def _following_when_loaded(
    weights: Sequence[torch.nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[None]:
    """A loaded state lies as it was saved: a fused optimizer would take it for other weights'."""

    def hook(optimizer: torch.optim.Optimizer) -> None:
        for weight in weights:
            for tensor in followers(weight, [optimizer]):
                restride(tensor, weight.stride())

    with ExitStack() as stack:
        for optimizer in optimizers:
            stack.callback(optimizer.register_load_state_dict_post_hook(hook).remove)
        yield

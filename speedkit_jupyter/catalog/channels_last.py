"""The switch `channels_last`: convolution weights in channels-last memory format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from speedkit_jupyter.catalog.base.decision import Decision, Effect, Form, Request, Snippet, Switch
from speedkit_jupyter.catalog.base.optimization import Optimization
from speedkit_jupyter.catalog.base.target import Target, newcomers
from speedkit_jupyter.catalog.facts.model import Facts, is_convolution
from speedkit_jupyter.catalog.model_changes.calls import Call, converted
from speedkit_jupyter.catalog.model_changes.tensors import (
    LAYOUT,
    channels_last_stride,
    has_own_storage,
    has_views,
    is_channels_last,
    weight_of,
)
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.support.units import count

HINT = (
    "code that calls .view() on activations or weights needs .reshape(); safetensors wants "
    "contiguous tensors: save {k: v.contiguous() for k, v in model.state_dict().items()}"
)
SHARED = "as before: other tensors (a view, a state_dict, an array) follow the weight's memory"

GROUP_NORM = "GroupNorm's backward pass may crash torch on a CPU after frozen layers in this layout"


class ChannelsLast(Optimization):
    """Store convolution weights as NHWC for Tensor Cores and oneDNN; activations become NHWC."""

    name = "channels_last"
    effect = Effect.ROUNDING
    summary = "convolution weights in NHWC layout"
    helps = "convolutions on Tensor Cores, and by oneDNN on CPUs"
    risk = "code that calls view() inside of the model; dropout draws other masks, in memory order"
    page = "https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html"
    Options = Switch

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        now = facts.convolutions > 0 and facts.channels_last == facts.convolutions
        if request.value is False:
            return request.leave(now, "the layout stays unchanged", asked=True)
        if facts.compiled == "script":
            return request.decline(False, "TorchScript keeps the layout that it was compiled with")
        if not facts.convolutions:
            return request.decline(False, "the model has no 2-D or 3-D convolution")
        if any(one.name == "LBFGS" for one in facts.optimizers):
            return request.decline(False, "LBFGS needs contiguous gradients")
        has_group_norm = any(issubclass(one, torch.nn.GroupNorm) for one in facts.classes)
        if facts.device_type == "cpu" and has_group_norm and facts.frozen_convolutions:
            return request.decline(False, GROUP_NORM)
        if now:
            return request.leave(True, "the convolutions are channels-last already")
        if request.value is True:
            return request.obey(True, f"for {count(facts.convolutions, 'convolution')}", hint=HINT)
        if facts.device_type == "cpu":
            reason = "oneDNN reads it without reordering, other operations may have to reorder"
            return request.offer(False, True, reason)
        gpu = hardware.accelerator(facts.device)
        if gpu is None or not gpu.tensor_cores:
            return request.leave(False, "it pays with Tensor Cores, which this device lacks")
        if facts.precision == "fp32" and not gpu.tf32:
            return request.leave(False, "Tensor Cores are idle in float32 here")
        reason = "Tensor Cores read NHWC, code that calls view() on activations may fail"
        return request.offer(False, True, reason)

    @contextmanager
    def applied(self, decision: Decision, target: Target) -> Iterator[None]:
        optimizers = target.live_optimizers()
        own = _laid_out(target)
        weights = {id(weight_of(m)) for m in target.model.modules() if is_convolution(m)}
        if shared := len(weights) - len(own):
            told = target.notes if own else target.declined
            told[self.name] = f"{count(shared, 'convolution')} {SHARED}"
        overrides = [(module, channels_last_stride(weight_of(module))) for module in own]
        del own
        with super().applied(decision, target), ExitStack() as stack:
            layer = stack.enter_context(LAYOUT.overriding(overrides, target.live_optimizers))
            del overrides  # the list would keep the model alive

            def renew(optimizer: torch.optim.Optimizer) -> None:
                own = {id(p) for group in optimizer.param_groups for p in group["params"]}
                for module in list(layer.things):
                    if id(weight_of(module)) in own:
                        layer.renew(module, [optimizer])

            def follow(optimizer: torch.optim.Optimizer) -> None:
                stack.callback(optimizer.register_load_state_dict_post_hook(renew).remove)
                renew(optimizer)

            for optimizer in optimizers:
                follow(optimizer)
            stack.enter_context(newcomers(target, optimizers, follow))
            yield

    def calls(self, decision: Decision, target: Target) -> list[Call]:
        return [PlainResults(target.model, target.notes, target.only_in)]

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        kinds = {4: ("2d", "channels_last"), 5: ("3d", "channels_last_3d")}
        formats = [kinds[dimensions] for dimensions in facts.convolution_dims]
        if len(formats) == 1:
            return Snippet(model=(f"model = model.to(memory_format=torch.{formats[0][1]})",))
        lines = ["for module in model.modules():"]
        for kind, memory_format in formats:
            classes = f"(torch.nn.Conv{kind}, torch.nn.ConvTranspose{kind})"
            lines.append(f"    if isinstance(module, {classes}):")
            lines.append(f"        module.to(memory_format=torch.{memory_format})")
        return Snippet(model=tuple(lines))

    def observe(self, target: Target, planned: Decision | None = None) -> Mapping[str, Any]:
        anew = {id(weight_of(module)) for module in _laid_out(target)} if planned else set()
        convolutions = [m for m in target.model.modules() if is_convolution(m)]
        last = sum(is_channels_last(m) or id(weight_of(m)) in anew for m in convolutions)
        words = f"{last} of {len(convolutions)} convolutions"
        return {"model.channels_last": words} if convolutions else {}

    def candidates(self, hardware: Hardware, facts: Facts) -> tuple[Any, ...]:
        return (True,) if facts.convolutions else ()


class PlainResults(Call):
    """A call whose channels-last results become contiguous, so that `.view()` works on them."""

    order = 1  # surrounds compiled code

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.below(*args, **kwargs)
        return converted(result, _contiguous) if self.acts() else result


def _contiguous(result: torch.Tensor) -> torch.Tensor:
    format = {4: torch.channels_last, 5: torch.channels_last_3d}.get(result.dim())
    if format is None or result.layout is not torch.strided:
        return result
    return result.contiguous() if result.is_contiguous(memory_format=format) else result


def note_views(target: Target) -> None:
    """Record once which weights have views, so that a plan converts the same weights each time."""
    for module in filter(is_convolution, target.model.modules()):
        target.memo.followed.setdefault(module, has_views(weight_of(module)))


def _laid_out(target: Target) -> list[torch.nn.Module]:
    """Return one convolution for each weight whose memory no other tensor shares."""
    model = target.model
    modules = {id(weight_of(m)): m for m in model.modules() if is_convolution(m)}
    users = Counter(tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers()))
    if target.search:
        note_views(target)
    found = []
    for module in modules.values():
        weight = weight_of(module)
        tensors = [weight] if weight.grad is None else [weight, weight.grad]
        is_alone = users[weight.data_ptr()] == 1 and all(map(has_own_storage, tensors))
        if is_alone and not target.memo.followed.get(module, False):
            found.append(module)
    return found

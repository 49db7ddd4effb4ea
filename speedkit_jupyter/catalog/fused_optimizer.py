"""The switch `fused_optimizer`: change optimizers in place to use torch's fused kernels."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from pydantic import AliasChoices, Field

from speedkit_jupyter.catalog.base.decision import Decision, Effect, Form, Request, Snippet, Switch
from speedkit_jupyter.catalog.base.optimization import Fields, Optimization
from speedkit_jupyter.catalog.base.target import Target, newcomers
from speedkit_jupyter.catalog.facts.model import Facts, OptimizerFacts
from speedkit_jupyter.catalog.model_changes.tensors import FUSED, Alignment, in_files
from speedkit_jupyter.machines import devices
from speedkit_jupyter.machines.hardware import Hardware

NONE_GIVEN = "no optimizer was given: add optimizer=… to apply, or make it outside the step"
FROZEN = "no parameter of the model requires gradients: apply again once some do"
LATER = "an optimizer made later gets its fused kernel at its first step"


class FusedOptimizer(Optimization):
    """Update parameters with a fused kernel, instead of operation by operation."""

    name = "fused_optimizer"
    effect = Effect.ROUNDING
    summary = "the optimizer's step in one fused kernel"
    helps = "training with many parameters"
    risk = "operations in another order, which is rounding"
    page = "https://docs.pytorch.org/docs/stable/optim.html#algorithms"
    aliases = ("optimizer",)

    class Options(Fields):
        enabled: Switch = Field("auto", validation_alias=AliasChoices("enabled", "fused"))

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        if request.word is False:
            return request.leave(False, "optimizers stay as they are", asked=True)
        if not facts.optimizers:
            if facts.frozen or not facts.dtypes:  # a loss module may have no parameters
                return request.decline(False, FROZEN)
            if facts.optimizers_later and devices.has_fused(facts.device, ""):
                return request.apply(True, LATER)
            return request.decline(False, NONE_GIVEN)
        obstacles = [(one.name, _obstacle(one, request.word)) for one in facts.optimizers]
        names = list(dict.fromkeys(name for name, obstacle in obstacles if obstacle is None))
        reasons = "; ".join(f"{name}: {why}" for name, why in obstacles if why is not None)
        if not names:
            return request.decline(False, reasons)
        has = "has a fused kernel" if len(names) == 1 else "have fused kernels"
        reason = f"{' and '.join(names)} {has} on {facts.device_type}"
        return request.apply(True, "; ".join(filter(None, (reason, reasons))))

    @contextmanager
    def applied(self, decision: Decision, target: Target) -> Iterator[None]:
        """Set `fused` in the block, where possible, on passed and newly created optimizers."""
        memo, notes, model = target.memo, target.notes, weakref.ref(target.model)
        if memo.preexisting is None:  # when first applied
            memo.preexisting = weakref.WeakSet(target.live_optimizers())
        known = weakref.WeakSet([*memo.preexisting, *target.optimizers])
        groups = ((one, group) for one in memo.preexisting for group in one.param_groups)
        plain = {type(one).__name__ for one, group in groups if not group.get("fused")}
        if plain and not target.optimizers:
            names = " and ".join(sorted(plain))
            notes[self.name] = f"your {names} was not given and stays as it is (--optimizer)"

        def switch(optimizer: torch.optim.Optimizer) -> OptimizerFacts | None:
            facts = OptimizerFacts.read(optimizer, filter(None, [model()]))
            if _obstacle(facts) is not None:
                return None
            layer.add(optimizer, True)
            stack.callback(optimizer.register_load_state_dict_post_hook(layer.renew).remove)
            stack.callback(optimizer.register_state_dict_post_hook(in_files).remove)
            alignment = Alignment()
            for hook in (alignment, _begin_momentum):
                stack.callback(optimizer.register_step_pre_hook(hook).remove)
            stack.callback(optimizer.register_load_state_dict_post_hook(alignment.loaded).remove)
            return facts

        def welcome(optimizer: torch.optim.Optimizer) -> None:
            if facts := switch(optimizer):
                memo.met_later[optimizer] = facts
                later = " and ".join(dict.fromkeys(type(one).__name__ for one in memo.met_later))
                notes[self.name] = f"{later}, made after the plan: fused too"

        with ExitStack() as stack:
            layer = stack.enter_context(FUSED.overriding(()))
            for optimizer in target.optimizers:
                switch(optimizer)
            for optimizer in set(target.live_optimizers()) - set(known):
                welcome(optimizer)
            stack.enter_context(newcomers(target, known, welcome))
            yield

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        if not facts.optimizers and form == "transformers":
            comment = "Trainer makes its AdamW with the fused kernel"
            return Snippet(comment, arguments={"optim": '"adamw_torch_fused"'})
        if not facts.optimizers:
            return Snippet("make the optimizer with fused=True where its class has a fused kernel")
        can = [_obstacle(optimizer) is None for optimizer in facts.optimizers]
        return Snippet(optimizers=tuple({"fused": "True"} if flag else {} for flag in can))

    def observe(self, target: Target, planned: Decision | None = None) -> Mapping[str, Any]:
        found: dict[str, Any] = {}
        for optimizer in target.optimizers:
            first, *others = {group.get("fused") for group in optimizer.param_groups}
            if planned:
                facts = OptimizerFacts.read(optimizer, [target.model])
                first, others = _obstacle(facts) is None or first, []
            found[f"{type(optimizer).__name__}.fused"] = "mixed" if others else first
        return found

    def candidates(self, hardware: Hardware, facts: Facts) -> tuple[Any, ...]:
        return (True,) * any(_obstacle(one, "auto") is None for one in facts.optimizers)


def _begin_momentum(optimizer: torch.optim.Optimizer, *step: Any) -> None:
    """Give zeros to new parameters: torch's fused SGD fails where only some have a buffer."""
    for group in optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else ():
        trained = [one for one in group["params"] if one.grad is not None]
        new = [p for p in trained if optimizer.state[p].get("momentum_buffer") is None]
        for parameter in new if len(new) < len(trained) and not group["dampening"] else ():
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _obstacle(optimizer: OptimizerFacts, asked: Switch = True) -> str | None:
    are_real = all(dtype.startswith(("bfloat16", "float")) for dtype in optimizer.dtypes)
    is_there = all(devices.has_fused(device, optimizer.name) for device in optimizer.devices)
    is_16_bit = {"float16", "bfloat16"}.intersection(optimizer.dtypes)
    is_rough = optimizer.name == "SGD" and is_16_bit and "cpu" in optimizer.devices
    rules = {
        "has no fused kernel in torch": not optimizer.has_fused,
        "is fused already": all(optimizer.fused),
        "fused kernels take no sparse gradients": optimizer.sparse_gradients,
        "fused kernels are not differentiable": optimizer.differentiable,
        f"fused kernels take no {', '.join(optimizer.dtypes)} parameters": not are_real,
        "torch's fused SGD rounds 16-bit parameters more": is_rough,
        f"has no fused kernel on {', '.join(optimizer.devices)}": not is_there,
        "capturable=True works on a GPU only": optimizer.capturable and "cpu" in optimizer.devices,
        "you set fused=False": asked == "auto" and False in optimizer.fused,
        "you set foreach=True": asked == "auto" and True in optimizer.foreach,
    }
    return next((reason for reason, holds in rules.items() if holds), None)

"""Existing optimizers switched to torch's fused kernels, in place and with their state."""

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
from speedkit_jupyter.catalog.properties.tensors import FUSED, in_files
from speedkit_jupyter.machines import devices
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.support.exceptions import did_you_mean

NONE_GIVEN = (
    "no optimizer was given: add optimizer=… to apply, or make it outside the step; "
    "one made inside is fused by apply(model), or with fused=True in your own code"
)
FROZEN = "no parameter of the model requires gradients: apply again once some do"
LATER = "no optimizer is there yet: one that is made later gets its fused kernel at its first step"


class FusedOptimizer(Optimization):
    """One kernel for all parameters in place of a loop over them."""

    name = "fused_optimizer"
    effect = Effect.ROUNDING
    summary = "the optimizer's step in one fused kernel"
    helps = "training with many parameters"
    risk = "another order of rounding"
    undone = "the settings of each parameter group are as before; moments stay"
    page = "https://docs.pytorch.org/docs/stable/optim.html#algorithms"
    aliases = ("optimizer",)

    class Options(Fields):
        """`enabled`: switch them; `name`: only optimizers of this class ("AdamW")."""

        enabled: Switch = Field("auto", validation_alias=AliasChoices("enabled", "fused"))
        name: str | None = Field(None, description="the class of the optimizers to switch")

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        """Turn it on for each optimizer that has a fused kernel; name the others' obstacles."""
        options = request.value
        if options.enabled is False:
            return request.leave(False, "optimizers stay as they are", asked=True)
        details = {"name": options.name} if options.name else {}
        if not facts.optimizers:
            if facts.frozen:
                return request.decline(False, FROZEN)
            if facts.optimizers_later and devices.has_fused(facts.device, options.name or ""):
                return request.apply(True, LATER, details=details)
            return request.decline(False, NONE_GIVEN)
        obstacles = [(o.name, _obstacle(o, options)) for o in facts.optimizers]
        names = list(dict.fromkeys(name for name, obstacle in obstacles if obstacle is None))
        reasons = "; ".join(f"{name}: {why}" for name, why in obstacles if why is not None)
        if not names:
            return request.decline(False, reasons)
        has = "has a fused kernel" if len(names) == 1 else "have fused kernels"
        reason = f"{' and '.join(names)} {has} on {facts.device_type}"
        others = f"; {reasons}" if reasons and not options.name else ""
        return request.apply(True, f"{reason}{others}", details=details)

    @contextmanager
    def applied(self, decision: Decision, target: Target) -> Iterator[None]:
        """Switch each possible optimizer, later ones at their first step."""
        options = self.Options(enabled=True, name=decision.details.get("name"))
        memo, notes, model = target.memo, target.notes, weakref.ref(target.model)
        if memo.preexisting is None:  # before the plan, and perhaps not handed over
            memo.preexisting = weakref.WeakSet(target.live_optimizers())
        known = weakref.WeakSet([*memo.preexisting, *target.optimizers])
        if not target.optimizers and len(memo.preexisting):
            names = " and ".join(sorted({type(one).__name__ for one in memo.preexisting}))
            notes[self.name] = f"your {names} was not given and stays as it is (--optimizer)"

        def switch(optimizer: torch.optim.Optimizer) -> OptimizerFacts | None:
            facts = OptimizerFacts.read(optimizer, filter(None, [model()]))
            if _obstacle(facts, options) is not None:
                return None
            layer.add(optimizer, True)
            stack.callback(optimizer.register_load_state_dict_post_hook(layer.renew).remove)
            stack.callback(optimizer.register_state_dict_post_hook(in_files).remove)
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
        name = str(decision.details.get("name") or "adamw").lower()  # as Trainer makes by itself
        if not facts.optimizers and form == "transformers" and name == "adamw":
            return Snippet(
                "Trainer makes its AdamW with the fused kernel",
                arguments={"optim": '"adamw_torch_fused"'},
            )
        if not facts.optimizers:
            return Snippet("make the optimizer with fused=True where its class has a fused kernel")
        options = self.Options(enabled=True, name=decision.details.get("name"))
        can = [_obstacle(optimizer, options) is None for optimizer in facts.optimizers]
        return Snippet(optimizers=tuple({"fused": "True"} if flag else {} for flag in can))

    def observe(self, target: Target, planned: Decision | None = None) -> Mapping[str, Any]:
        found: dict[str, Any] = {}
        for optimizer in target.optimizers:
            first, *others = {group.get("fused") for group in optimizer.param_groups}
            if planned:
                options = self.Options(enabled=True, name=planned.details.get("name"))
                facts = OptimizerFacts.read(optimizer, [target.model])
                first, others = _obstacle(facts, options) is None or first, []
            found[f"{type(optimizer).__name__}.fused"] = "mixed" if others else first
        return found

    def candidates(self, hardware: Hardware, facts: Facts) -> tuple[Any, ...]:
        able = any(_obstacle(o, self.default) is None for o in facts.optimizers)
        return (True,) if able else ()


def _obstacle(optimizer: OptimizerFacts, options: Any) -> str | None:
    """Return the reason why this optimizer is not switched, or None."""
    name = options.name or optimizer.name
    are_real = all(dtype.startswith(("bfloat16", "float")) for dtype in optimizer.dtypes)
    is_there = all(devices.has_fused(device, optimizer.name) for device in optimizer.devices)
    rules = {
        f"only {name} was asked for.{did_you_mean(name, [optimizer.name])}": (
            name.lower() != optimizer.name.lower()
        ),
        "has no fused kernel in torch": not optimizer.has_fused,
        "is fused already": all(optimizer.fused),
        "fused kernels take no sparse gradients": optimizer.sparse_gradients,
        "fused kernels are not differentiable": optimizer.differentiable,
        f"fused kernels take no {', '.join(optimizer.dtypes)} parameters": not are_real,
        f"has no fused kernel on {', '.join(optimizer.devices)}": not is_there,
        "capturable=True works on a GPU only": optimizer.capturable and "cpu" in optimizer.devices,
        "you set fused=False": options.enabled == "auto" and False in optimizer.fused,
        "you set foreach=True": options.enabled == "auto" and True in optimizer.foreach,
    }
    return next((reason for reason, holds in rules.items() if holds), None)

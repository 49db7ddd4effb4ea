"""Existing optimizers switched to torch's fused kernels, in place and with their state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from pydantic import AliasChoices, Field

from speedkit_jupyter.exceptions import did_you_mean
from speedkit_jupyter.facts import Facts, OptimizerFacts
from speedkit_jupyter.hardware import Hardware
from speedkit_jupyter.optimizations.base import (
    Decision,
    Effect,
    Fields,
    Optimization,
    Request,
    Switch,
    Target,
)
from speedkit_jupyter.optimizations.snippet import Form, Snippet

if TYPE_CHECKING:
    import torch

# Devices of torch's fused kernels (`torch.utils._foreach_utils`), of those that we plan for.
DEVICES = ("cpu", "cuda", "mps", "xpu")
MISSING = object()


class FusedOptimizer(Optimization):
    """One kernel for all parameters in place of a loop over them."""

    name = "fused_optimizer"
    effect = Effect.ROUNDING
    summary = "the optimizer's step in one fused kernel"
    aliases = ("optimizer",)

    class Options(Fields):
        """`enabled`: switch them; `name`: only optimizers of this class ("AdamW")."""

        enabled: Switch = Field(
            "auto",
            description="auto, true, false",
            validation_alias=AliasChoices("enabled", "fused"),
        )
        name: str | None = Field(None, description="the class of the optimizers to switch")

    default = Options()

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        """On for every optimizer that can; the first obstacle of the others is the reason."""
        options = request.value
        if options.enabled is False:
            return request.leave(False, "as asked: optimizers stay as they are")
        if not facts.optimizers:
            return request.decline(False, "no optimizer was given: add optimizer=… to apply")
        obstacles = [(o.name, _obstacle(o, options, facts)) for o in facts.optimizers]
        able = [name for name, obstacle in obstacles if obstacle is None]
        reasons = "; ".join(f"{name}: {why}" for name, why in obstacles if why is not None)
        if not able:
            return request.decline(False, reasons)
        reason = f"{', '.join(able)} has a fused kernel on {facts.device_type}"
        if options.name:
            return request.apply(True, reason, details={"name": options.name})
        return request.apply(True, f"{reason}; {reasons}" if reasons else reason)

    def expected(self, decision: Decision, target: Target, facts: Facts) -> Mapping[str, Any]:
        """`fused` of the optimizers that can be switched."""
        options = self.Options(enabled=True, name=decision.details.get("name"))
        return {
            f"{type(optimizer).__name__}.fused": True
            for optimizer, its_facts in zip(target.optimizers, facts.optimizers, strict=True)
            if _obstacle(its_facts, options, facts) is None
        }

    @contextmanager
    def applied(self, decision: Decision, target: Target) -> Iterator[None]:
        """Switch every optimizer that can be."""
        options = self.Options(enabled=True, name=decision.details.get("name"))
        facts = Facts.read(target.model, target.optimizers)
        with ExitStack() as stack:
            for optimizer, its_facts in zip(target.optimizers, facts.optimizers, strict=True):
                if _obstacle(its_facts, options, facts) is None:
                    stack.enter_context(_switched(optimizer))
            yield

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        """`fused=True` for every optimizer that can."""
        options = self.Options(enabled=True, name=decision.details.get("name"))
        can = [_obstacle(optimizer, options, facts) is None for optimizer in facts.optimizers]
        return Snippet(optimizers=tuple({"fused": "True"} if one else {} for one in can))

    def observe(self, target: Target) -> Mapping[str, Any]:
        """`fused` of each optimizer's groups."""
        return {
            f"{type(optimizer).__name__}.fused": _shown(
                {group.get("fused") for group in optimizer.param_groups}
            )
            for optimizer in target.optimizers
        }

    def candidates(self, hardware: Hardware, facts: Facts) -> tuple[Any, ...]:
        """On, where an optimizer can be switched."""
        able = any(_obstacle(o, self.default, facts) is None for o in facts.optimizers)
        return (True,) if able else ()


def _shown(values: set[Any]) -> Any:
    return next(iter(values)) if len(values) == 1 else "mixed"


def _obstacle(optimizer: OptimizerFacts, options: Any, facts: Facts) -> str | None:
    """Why this optimizer is not switched, or None."""
    rules = (
        (
            options.name is not None and options.name.lower() != optimizer.name.lower(),
            f"only {options.name} was asked for.{did_you_mean(options.name, [optimizer.name])}",
        ),
        (not optimizer.has_fused, "has no fused kernel in torch"),
        (all(optimizer.fused), "is fused already"),
        (
            optimizer.name == "Adagrad"
            and not {one.partition(":")[0] for one in optimizer.devices} <= {"cpu", "cuda"},
            f"has no fused kernel on {', '.join(optimizer.devices)}",
        ),
        (facts.sparse_gradients, "fused kernels take no sparse gradients"),
        (optimizer.differentiable, "fused kernels are not differentiable"),
        (
            any(not dtype.startswith(("float", "bfloat")) for dtype in optimizer.dtypes),
            f"fused kernels take no {', '.join(optimizer.dtypes)} parameters",
        ),
        (
            any(device.partition(":")[0] not in DEVICES for device in optimizer.devices),
            f"no fused kernel on {', '.join(optimizer.devices)}",
        ),
        (
            optimizer.capturable and "cpu" in optimizer.devices,
            "capturable=True works on a GPU only",
        ),
        (
            options.enabled == "auto" and False in optimizer.fused,
            "you set fused=False",
        ),
        (options.enabled == "auto" and True in optimizer.foreach, "you set foreach=True"),
    )
    return next((reason for holds, reason in rules if holds), None)


@contextmanager
def _switched(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """One optimizer with fused=True: settings, the flag for GradScaler, and where `step` lies."""
    import torch

    holders: list[Any] = [optimizer.defaults, *optimizer.param_groups]
    settings = [(h, {k: h.get(k, MISSING) for k in ("fused", "foreach")}) for h in holders]
    attributes = {
        name: optimizer.__dict__.get(name, MISSING)
        for name in ("_step_supports_amp_scaling", "_need_device_dtype_check_for_fused")
    }
    steps = _steps(optimizer)

    def switch(optimizer: Any) -> None:
        for holder in (optimizer.defaults, *optimizer.param_groups):
            holder["fused"] = True
            if holder.get("foreach"):
                holder["foreach"] = False
        optimizer._step_supports_amp_scaling = True
        for parameter in _steps(optimizer):
            _move_step(optimizer, parameter, parameter.device, torch.float32)

    # `load_state_dict` brings the saved groups with it, which are not fused.
    loaded = optimizer.register_load_state_dict_post_hook(switch)
    try:
        switch(optimizer)
        yield
    finally:
        loaded.remove()
        for holder, values in settings:
            _put_back(holder, values)
        for group in optimizer.param_groups:
            if not any(group is holder for holder in holders):  # added or loaded meanwhile
                _put_back(group, settings[0][1])
        _put_back(optimizer.__dict__, attributes)
        for parameter in _steps(optimizer):
            found = steps.get(parameter)
            capturable = any(group.get("capturable") for group in optimizer.param_groups)
            device = found.device if found else (parameter.device if capturable else "cpu")
            _move_step(optimizer, parameter, device, found.dtype if found else None)


class _Step:
    """Where a parameter's `step` lay and what it was made of."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.device, self.dtype = tensor.device, tensor.dtype


def _steps(optimizer: torch.optim.Optimizer) -> dict[Any, _Step]:
    import torch

    return {
        parameter: _Step(state["step"])
        for parameter, state in optimizer.state.items()
        if isinstance(state, dict) and isinstance(state.get("step"), torch.Tensor)
    }


def _move_step(optimizer: Any, parameter: Any, device: Any, dtype: Any) -> None:
    state = optimizer.state[parameter]
    step = state["step"]
    if step.device != device or (dtype is not None and step.dtype != dtype):
        step.data = step.to(device=device, dtype=dtype or step.dtype)


def _put_back(holder: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if value is MISSING:
            holder.pop(name, None)
        else:
            holder[name] = value

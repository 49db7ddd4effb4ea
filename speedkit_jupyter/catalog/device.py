"""The switch `device`: move the model and optimizer state, by default from the CPU to a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import torch
from pydantic import Field

from speedkit_jupyter import machines
from speedkit_jupyter.catalog.base.decision import Decision, Effect, Form, Request, Snippet
from speedkit_jupyter.catalog.base.optimization import Optimization
from speedkit_jupyter.catalog.base.target import Target
from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.catalog.model_changes.tensors import PLACE
from speedkit_jupyter.machines import devices
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.torchglue.modules import buffer_table

ON = "the model is on {}"


class Device(Optimization):
    """Move the model, its gradients and its optimizers' state; the user moves the batches."""

    name = "device"
    effect = Effect.ROUNDING
    free = "NAME"
    summary = "the device that the model runs on"
    helps = "large models, where a GPU is idle"
    risk = "your own code must move the batches; another device rounds differently"
    page = "https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.to"
    Options = Annotated[
        str, Field(pattern=rf"^(auto|{devices.PATTERN})$", description=f"auto, {devices.WORDS}")
    ]
    frameworks_choose = True

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        here = facts.device
        if len(facts.devices) > 1:
            return request.decline(here, f"the model is on {', '.join(facts.devices)} already")
        if facts.device_type == "meta":
            return request.decline(here, "parameters are on 'meta': materialize them first")
        asked = request.value
        if asked == "auto":
            if facts.device_type in devices.TPUS:
                return request.leave(here, f"{here} is a TPU, and SpeedKit has no plans for TPUs")
            if facts.device_type != "cpu":
                return request.leave(here, hardware.missing_kernels(here) or ON.format(here))
            if not hardware.accelerators:
                return request.leave(here, f"no GPU found{_tpu(hardware)}")
            asked = hardware.accelerators[0].kind
        if asked in (here, facts.device_type):
            return request.leave(here, f"{ON.format(here)} already")
        gpu = hardware.accelerator(asked)
        if asked != "cpu" and gpu is None:
            return request.decline(here, f"this machine has no {asked} ({_found(hardware)})")
        if why := hardware.missing_kernels(asked):
            return request.decline(here, why)
        name = hardware.cpu.name if gpu is None else gpu.name
        hint, kind = "move batches with .to(ctx.device)", devices.kind_of(asked)
        is_short = kind is not None and kind.is_numbered and ":" not in asked
        there = f"{asked}:0" if is_short else asked
        return request.apply(there, f"from {here} to {name}", hint=hint)

    def as_is(self, facts: Facts) -> Any:
        return facts.device

    def facts_after(self, decision: Decision, facts: Facts) -> Facts:
        return facts.moved(decision.value) if decision.active else facts

    @contextmanager
    def applied(self, decision: Decision, target: Target) -> Iterator[None]:
        """Move model and optimizer state in the block. Raises SpeedKitError without the device."""
        _check_that_it_is_here(decision.value)
        overrides = [(tensor, decision.value) for tensor in _tensors(target.model)]
        with PLACE.overriding(overrides, target.live_optimizers):
            origins = {PLACE.original(tensor) for tensor, _ in overrides}
            del overrides
            _to(target.model, decision.value)
            yield
        now = {str(t.device) for t in _tensors(target.model)} if target.model is not None else set()
        if now == origins and len(now) == 1:
            _to(target.model, now.pop())

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        kind, _, index = facts.device.partition(":")
        if form == "torch":
            move = f'.to("{facts.device}")'
            return Snippet(decision.why, model=(f"model = model{move}",), batch=move)
        if kind == "cpu":
            return Snippet(decision.why, arguments={"use_cpu": "True"})
        if kind != "cuda" or not index.strip("0"):  # Trainer uses the first visible GPU
            return Snippet(decision.why)
        seen = f'os.environ["CUDA_VISIBLE_DEVICES"] = "{index}"'
        return Snippet(decision.why, imports=("import os",), setup=(seen,))

    def observe(self, target: Target, planned: Decision | None = None) -> Mapping[str, Any]:
        parameter = next(iter(target.model.parameters()), None)
        if parameter is None:
            return {}
        where = planned.value if planned else str(parameter.device)
        kind = devices.kind_of(where)
        is_short = planned and kind is not None and not kind.is_numbered
        return {"model.device": f"{where}:0" if is_short else where}  # tensors are on `mps:0`


def _tpu(hardware: Hardware) -> str:
    """Return a note on an installed library for TPUs, or an empty string."""
    library = next((one for one in devices.TPUS.values() if one in hardware.libraries), "")
    return library and f"; {library} is installed, and SpeedKit has no plans for TPUs"


def _found(hardware: Hardware) -> str:
    return f"found: {', '.join(one.name for one in hardware.accelerators) or 'no GPU'}"


def _check_that_it_is_here(device: str) -> None:
    here, pinned = Hardware.detect(), Hardware.current().pinned
    if device != "cpu" and here.accelerator(device) is None:
        whose = f" ({machines.as_for(pinned)})" if pinned else ""
        raise SpeedKitError(
            f"the plan{whose} moves the model to {device}, which this machine lacks "
            f"({_found(here)}); with `device: cpu` it stays on the CPU"
        )


def _tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def _to(model: torch.nn.Module, device: str) -> None:
    """Move a model with its own `to()`, and keep the buffer objects."""
    buffers = [(m, name, b) for m in model.modules() for name, b in buffer_table(m).items()]
    model.to(device)
    for module, name, buffer in buffers:
        if buffer is not None:
            buffer_table(module)[name] = buffer

"""The GradScaler of fp16 training."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from speedkit_jupyter.catalog.base.decision import Decision, Effect, Form, Request, Snippet, Switch
from speedkit_jupyter.catalog.base.optimization import Fields, Optimization
from speedkit_jupyter.catalog.base.target import Target, newcomers
from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.support import messages
from speedkit_jupyter.support.exceptions import SpeedKitError

FORGOTTEN = (
    "fp16 without the GradScaler: small gradients become zero. Replace loss.backward() and "
    "optimizer.step() by ctx.grad_scaler.scale(loss).backward(); "
    "ctx.grad_scaler.step(optimizer); ctx.grad_scaler.update()"
)


class GradScaler(Optimization):
    """fp16 gradients underflow to zero unless the loss is scaled; bf16 and fp32 need nothing."""

    name = "grad_scaler"
    effect = Effect.ROUNDING
    summary = "loss scaling for fp16 training"
    helps = "fp16 training, and nothing else"
    risk = "a step whose gradients overflow is skipped"
    page = "https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling"
    variable = None
    follows = True

    class Options(Fields):
        enabled: Switch = "auto"

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        asked = request.value.enabled
        unscalable = [one for one in facts.dtypes if one.startswith(("float16", "complex"))]
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

        def first_step(optimizer: torch.optim.Optimizer) -> None:
            if memo.autocast_entered and not memo.steps_watched and not _called_by_a_scaler():
                messages.warn(FORGOTTEN)
            memo.steps_watched = memo.steps_watched or memo.autocast_entered

        memo.scales = True
        try:
            with newcomers(target, (), first_step):
                yield
        finally:
            memo.scales = False

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        if form == "transformers":
            if facts.precision == "fp16" and facts.device_type != "cpu":
                return Snippet()
            raise SpeedKitError("Trainer scales the loss for fp16 on a GPU only: take --as torch")
        return Snippet(
            training=(f'scaler = torch.amp.GradScaler("{facts.device_type}")',),
            loss="scaler.scale(loss)",
            step="scaler.step({optimizer})",
            after_step=("scaler.update()",),
        )

    def observe(self, target: Target, planned: Decision | None = None) -> Mapping[str, Any]:
        return {"ctx.grad_scaler": "on" if planned or target.memo.scales else "off"}


def _called_by_a_scaler() -> bool:
    """Return whether some GradScaler, the user's own too, is among the callers."""
    callers = traceback.walk_stack(sys._getframe(1))
    return any(frame.f_globals.get("__name__") == "torch.amp.grad_scaler" for frame, _ in callers)

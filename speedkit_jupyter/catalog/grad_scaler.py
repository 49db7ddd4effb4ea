"""Apply the GradScaler that fp16 training needs inside the user's own loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from speedkit_jupyter.catalog.base import scaling
from speedkit_jupyter.catalog.base.decision import Decision, Effect, Form, Request, Snippet, Switch
from speedkit_jupyter.catalog.base.optimization import Fields, Optimization
from speedkit_jupyter.catalog.base.target import Target
from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.support.exceptions import SpeedKitError


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
        if memo.scaler is None:
            parameter = next(target.model.parameters())
            memo.scaler = torch.amp.GradScaler(parameter.device.type)
        memo.scales = True
        try:
            with scaling.scaled(target):
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
        return {"loss.scaled": "on" if planned or target.memo.scales else "off"}

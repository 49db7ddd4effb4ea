"""The switch `cudnn_benchmark`: cuDNN's search for the fastest convolution algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from speedkit_jupyter.catalog.base.decision import Decision, Effect, Request, Switch
from speedkit_jupyter.catalog.base.optimization import Optimization
from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.machines import flags
from speedkit_jupyter.machines.hardware import Hardware


class CudnnBenchmark(Optimization):
    """Let cuDNN search for its fastest algorithm once per input shape. Useful if shapes repeat."""

    name, flag = "cudnn_benchmark", "cudnn.benchmark"
    effect = Effect.ROUNDING  # another algorithm sums in another order
    summary = "cuDNN picks its convolution algorithm by trying"
    helps = "convolutions on CUDA whose shapes stay the same"
    risk = "each new shape costs a search; another algorithm sums in another order"
    page = "https://docs.pytorch.org/docs/stable/backends.html"
    line = "torch.backends.cudnn.benchmark = {value}"
    Options = Switch

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        now = bool(self.as_is(facts))
        if facts.device_type != "cuda":
            why = f"cuDNN does not run on {facts.device_type}"
            return request.decline(now, why) if request.value else request.leave(now, why)
        if request.value == now:
            return request.leave(now, f"already {'on' if now else 'off'}")
        if request.value != "auto":
            return request.obey(request.value, hint="each new input shape costs a search")
        if now:
            return request.leave(True, "you have set it already")
        if not facts.convolutions:
            return request.leave(now, "the model has no 2-D or 3-D convolution")
        if facts.flags.get("cudnn.deterministic", False):
            return request.leave(now, "cudnn.deterministic is on: the search could break it")
        reason = f"{facts.convolutions} convolutions; each new input shape would cost a search"
        return request.offer(False, True, reason)

    def process_flags(self) -> Mapping[str, flags.Flag]:
        return {self.flag: flags.attribute(torch.backends.cudnn, "benchmark", True)}

    def candidates(self, hardware: Hardware, facts: Facts) -> tuple[Any, ...]:
        return (True,) if facts.device_type == "cuda" and facts.convolutions else ()

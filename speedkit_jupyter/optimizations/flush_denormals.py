"""Denormal numbers taken for zero on a CPU, which computes with them many times slower."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Annotated, Any

from pydantic import Field

from speedkit_jupyter.machines import denormals, flags
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.optimizations.base.decision import Decision, Effect, Request, Switch
from speedkit_jupyter.optimizations.base.optimization import Optimization
from speedkit_jupyter.optimizations.base.snippet import Form, Snippet
from speedkit_jupyter.optimizations.base.target import Target
from speedkit_jupyter.optimizations.facts.model import Facts


class FlushDenormals(Optimization):
    """Below 1.2e-38 (float32) numbers lose digits, and many CPUs compute with them in microcode.

    They come with weights that decay, with gradients that vanish, and with Adam's averages for
    units that are never active: 2.1x on a step of which 31 % of the numbers were (on Zen 5, which
    is good at them), nothing where there are few or none.
    """

    name = "flush_denormals"
    effect = Effect.ROUNDING
    summary = "numbers too small for all their digits are zero, on a CPU"
    helps = "CPUs, where weights, activations or an optimizer's averages have decayed below 1.2e-38"
    risk = (
        "what is so small is zero, in all that this thread computes; threads and processes that "
        "begin meanwhile have it for good"
    )
    undone = (
        "the setting is what it was in the thread that applied it, and in those that share its "
        "operators' work"
    )
    page = "https://docs.pytorch.org/docs/stable/generated/torch.set_flush_denormal.html"
    Options = Annotated[Switch, Field(description="auto, true, false")]

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        """By request, and worth measuring where the model holds such numbers."""
        now = bool(facts.flags.get(denormals.NAME, False))
        if facts.device_type != "cpu":
            return request.decline(now, f"the model is on {facts.device}: this is about CPUs")
        if hardware.cpu.architecture not in denormals.ARCHITECTURES:
            return request.decline(now, f"torch can't set it on {hardware.cpu.architecture}")
        if request.value is False and not now:
            return request.leave(False, "off, as it is", asked=True)
        if request.value != "auto":
            return request.obey(
                request.value, hint="in this thread and those that share its operators' work"
            )
        if now:
            return request.leave(True, "you have set it already")
        if not facts.denormals:
            return request.leave(False, "no denormal number was seen in the model")
        share = f"{100 * facts.denormals:.2g} % of the model's numbers are denormal"
        return request.offer(False, True, f"{share}: on many CPUs they take far longer")

    def switches(self) -> Mapping[str, flags.Switch]:
        """This thread's."""
        return {denormals.NAME: denormals.switch()}

    def expected(self, decision: Decision, target: Target, facts: Facts) -> Mapping[str, Any]:
        """The switch."""
        return {denormals.NAME: decision.value}

    def applied(self, decision: Decision, target: Target) -> AbstractContextManager[None]:
        """Set it in this thread, and in those that share the work of its operators."""
        return denormals.flushed(decision.value, target.kept)

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        """The same line everywhere, and first: threads have what the one has that starts them."""
        line = f"torch.set_flush_denormal({decision.value})"
        return Snippet(setup=(f"{line}  # before torch starts its threads, which follow",))

    def candidates(self, hardware: Hardware, facts: Facts) -> tuple[Any, ...]:
        """On, where there is something to flush."""
        return (True,) if facts.device_type == "cpu" and facts.denormals else ()

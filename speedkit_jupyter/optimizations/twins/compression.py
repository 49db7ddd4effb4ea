"""What the optimizations have in common that multiply by something else than a linear layer's own
weight: of fewer bits, or half of them zero.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.optimizations.base.decision import Decision, Effect, Request
from speedkit_jupyter.optimizations.base.optimization import Optimization
from speedkit_jupyter.optimizations.base.target import Target
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.optimizations.twins import compressing
from speedkit_jupyter.optimizations.twins.twinned import internals

if TYPE_CHECKING:
    import torch

UNDONE = "the weights never left their places: nothing multiplies in their stead any more"


class Compression(Optimization):
    """By request only; one of them at a time.

    `for_training` says that optimizers may step. Rows and columns of a weight have to be
    `multiples` of these numbers. `casts` marks kernels that know one dtype only, and that torch may
    have been built without. `bare` is the word that the name alone stands for, where it is not
    `true`.
    """

    effect = Effect.CHANGES_MODEL
    variable = None
    undone = UNDONE
    for_training: ClassVar[bool] = False
    multiples: ClassVar[tuple[int, int]] = (1, 1)
    casts: ClassVar[bool] = False
    bare: ClassVar[str] = ""
    hint: ClassVar[str] = ""
    on_request: ClassVar[str] = (
        "it makes another model of this one: by request only, and then measured"
    )

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        """Where the device multiplies so, and nothing is trained that can't be."""
        if request.value == "auto":
            return request.leave(False, self.on_request)
        if request.value is False:
            return request.leave(False, asked=True)
        training = "" if self.for_training else compressing.training(facts)
        missing = self.missing_units(request.value, hardware, facts)
        if obstacle := training or missing or self.obstacle(hardware, facts):
            return request.decline(False, obstacle)
        internals()
        return request.obey(request.value, self.about(request.value, facts), hint=self.hint)

    @abstractmethod
    def missing_units(self, value: Any, hardware: Hardware, facts: Facts) -> str:
        """Why this device does not multiply so; empty where it does."""

    def obstacle(self, hardware: Hardware, facts: Facts) -> str:
        """What else is in its way; empty where nothing is."""
        return compressing.unfit(facts)

    def about(self, value: Any, facts: Facts) -> str:
        """What it is done to."""
        number = f"{facts.linears} linear layers"
        return number if self.for_training else f"{number}, where no gradients are recorded"

    @abstractmethod
    def maker(self, decision: Decision, target: Target) -> Callable[[Any], Any]:
        """What makes the twin of a weight: a tensor of its values, or a layer that reads it."""

    def fits(self, decision: Decision, weight: torch.Tensor) -> bool:
        """Whether a weight is such as its kernels take."""
        sizes = zip(weight.shape, self.multiples, strict=True)
        return all(size % multiple == 0 for size, multiple in sizes)

    def none_fits(self, decision: Decision) -> str:
        """What a report says where no weight does."""
        rows, columns = self.multiples
        sizes = f", with rows a multiple of {rows} and columns of {columns}"
        return f"no linear layer has a plain weight{'' if rows == columns == 1 else sizes}"

    @contextmanager
    def applied(self, decision: Decision, target: Target) -> Iterator[None]:
        """Lay a twin beside every weight that fits."""
        weights = compressing.weights_of(target.model, partial(self.fits, decision))
        if not weights:
            target.notes[self.name] = self.none_fits(decision)
        block = compressing.compressed(
            target,
            self.name,
            weights,
            self.maker(decision, target),
            makes_layers=self.for_training,
            casts=self.casts,
        )
        del weights  # whatever this function names lives as long as the plan
        with block:
            yield

    def changes(self) -> dict[str, Any]:
        """The word alone is the `bare` one."""
        return ({self.name: self.bare} if self.bare else {}) | super().changes()

    def facts_after(self, decision: Decision, facts: Facts) -> Facts:
        """No other has the same weights."""
        return replace(facts, quantized=self.name) if decision.active else facts

    def observe(self, target: Target) -> Mapping[str, Any]:
        """How many layers multiply so."""
        return compressing.counted(target.model, self.name)

    def expected(self, decision: Decision, target: Target, facts: Facts) -> Mapping[str, Any]:
        """Those whose weights are plain ones, and fit."""
        return compressing.expected(target.model, self.name, partial(self.fits, decision))


def older_than(capability: tuple[int, int], hardware: Hardware, facts: Facts) -> str:
    """What an NVIDIA GPU of an older compute capability has, or another device is; else empty."""
    gpu = hardware.accelerator(facts.device)
    if gpu is None or not gpu.is_nvidia or gpu.capability is None:
        return f"this is {facts.device if gpu is None else gpu.name}"
    if gpu.capability < capability:
        return f"{gpu.name} has {'.'.join(map(str, gpu.capability))}"
    return "" if gpu.tensor_cores else f"{gpu.name} has no Tensor Cores"


def for_good(decision: Decision) -> str:
    """The reason in generated code, which can't keep the weights beside what multiplies."""
    return f"{decision.reason}; it takes the weights' place for good"

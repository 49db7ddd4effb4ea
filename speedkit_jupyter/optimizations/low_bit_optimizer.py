"""An optimizer's moments in 8 or 4 bits between its steps, by torchao."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.optimizations.base.decision import Decision, Effect, Request
from speedkit_jupyter.optimizations.base.late_optimizers import newcomers
from speedkit_jupyter.optimizations.base.optimization import Optimization
from speedkit_jupyter.optimizations.base.snippet import Form, Snippet
from speedkit_jupyter.optimizations.base.target import Target
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.optimizations.facts.optimizers import OptimizerFacts
from speedkit_jupyter.optimizations.moments.narrow import all_narrow
from speedkit_jupyter.optimizations.moments.stepping import narrow_moments
from speedkit_jupyter.optimizations.twins import quantizing
from speedkit_jupyter.optimizations.twins.quantization import true_is

if TYPE_CHECKING:
    import torch

# Those of torch.optim whose moments lie like their parameters; and what torchao has in their stead.
OF_TORCHAO = {"Adam": "Adam", "AdamW": "AdamW"}
ABLE = (*OF_TORCHAO, "NAdam", "RAdam", "SGD")
NONE_GIVEN = "no optimizer was given: add optimizer=… to apply, or make it outside the step"
ON_REQUEST = "it rounds the moments of the optimizer: by request only, and then measured"


class LowBitOptimizer(Optimization):
    """Moments are rounded in blocks that share a scale; the step itself is the optimizer's own."""

    name = "low_bit_optimizer"
    effect = Effect.CHANGES_MODEL
    library = "torchao"
    variable = None
    excludes = frozenset({"cuda_graphs"})
    summary = "an optimizer's moments in 8 or 4 bits between its steps"
    helps = "training whose optimizer takes much of the memory: two moments for each parameter"
    risk = "moments are rounded at each step: another course of training; steps take longer"
    undone = "moments are plain tensors again, as rounded as they were"
    page = "https://docs.pytorch.org/ao/stable/api_reference/api_ref_optim.html"
    Options = Annotated[
        Literal["auto", False, "8bit", "4bit"],
        true_is("8bit"),
        Field(description="auto, false, 8bit, 4bit"),
    ]

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        """By request only."""
        if request.value is False:
            return request.leave(False, asked=True)
        if request.value == "auto":
            return request.leave(False, ON_REQUEST)
        if why := quantizing.unfit_here(hardware):
            return request.decline(False, why)
        if not facts.optimizers and facts.optimizers_later:
            return request.obey(request.value, "for an optimizer that is made later")
        able = [one.name for one in facts.optimizers if not _obstacle(one)]
        others = [f"{one.name}: {why}" for one in facts.optimizers if (why := _obstacle(one))]
        if not able:
            return request.decline(False, "; ".join(others) or NONE_GIVEN)
        reason = (
            f"moments of {' and '.join(dict.fromkeys(able))} are kept in {_bits(request.value)}"
        )
        return request.obey(request.value, "; ".join([reason, *others]))

    def expected(self, decision: Decision, target: Target, facts: Facts) -> Mapping[str, Any]:
        """Moments are rounded after the next step."""
        return {}

    @contextmanager
    def applied(self, decision: Decision, target: Target) -> Iterator[None]:
        """Around the steps of each optimizer that can, of those that are made later too."""
        if decision.value is False:
            yield
            return
        model, only_in = weakref.ref(target.model), target.only_in

        def can(optimizer: torch.optim.Optimizer) -> bool:
            return not _obstacle(OptimizerFacts.read(optimizer, filter(None, [model()])))

        with ExitStack() as stack:

            def welcome(optimizer: torch.optim.Optimizer) -> None:
                if can(optimizer):
                    stack.enter_context(narrow_moments(optimizer, decision.value, only_in))

            for optimizer in target.optimizers:
                welcome(optimizer)
            stack.enter_context(newcomers(target, _known(target), welcome))
            yield

    def observe(self, target: Target) -> Mapping[str, Any]:
        """How many moments are rounded, of the optimizers that have some."""
        counts = {type(one).__name__: len([*all_narrow(one)]) for one in target.optimizers}
        return {f"{name}.low_bit": f"{count} moments" for name, count in counts.items() if count}

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        """torchao's own optimizer in place of torch's."""
        names = [OF_TORCHAO.get(one.name) for one in facts.optimizers]
        word = str(decision.value)
        made = [f"{name}{word}" for name in names if name] or [f"AdamW{word}"]
        if form == "transformers":
            return Snippet(arguments={"optim": f'"adamw_torch_{word}"'})
        listed = " and ".join(dict.fromkeys(made))
        return Snippet(
            f"from torchao.optim import {listed}: takes what torch's takes, in its stead"
        )


def _bits(value: Any) -> str:
    return f"{str(value).removesuffix('bit')} bits"


def _known(target: Target) -> Iterable[torch.optim.Optimizer]:
    """Those that were there before the plan."""
    return weakref.WeakSet([*target.live_optimizers(), *target.optimizers])


def _obstacle(optimizer: OptimizerFacts) -> str:
    """Why the moments of this one stay as they are; empty where they need not."""
    rules = (
        (optimizer.name not in ABLE, f"only those of {', '.join(ABLE)} are"),
        (not optimizer.own_step, "its step is not torch's own"),
        (optimizer.differentiable, "its step is differentiable"),
        (optimizer.capturable, "capturable=True: a recorded step knows where its moments lie"),
        (optimizer.sparse_gradients, "its gradients are sparse"),
    )
    return next((why for holds, why in rules if holds), "")

"""What a plan is learned for: the models and the machine, and what a step does with them."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.measure.checks.attention_kernels import Seen
from speedkit_jupyter.measure.checks.attention_kernels import noted as noted_in
from speedkit_jupyter.measure.results.record import Record
from speedkit_jupyter.measure.rounds import clock, repetition
from speedkit_jupyter.measure.rounds.budget import Budget
from speedkit_jupyter.measure.rounds.confinement import optimizer_hooks
from speedkit_jupyter.measure.rounds.runner import Runner
from speedkit_jupyter.measure.subject import repeats
from speedkit_jupyter.measure.subject.observed import optimizers_made
from speedkit_jupyter.measure.subject.step import Step
from speedkit_jupyter.optimizations.facts.attention import Call
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.plans.applying import hidden, prepare
from speedkit_jupyter.plans.planning import describe
from speedkit_jupyter.support.thread_origin import is_here
from speedkit_jupyter.support.torch_private import tree_leaves
from speedkit_jupyter.support.wrappers import unwrapped

if TYPE_CHECKING:
    import torch

# A step is looked at again until that took so long, or so often.
SHORT_S, MOST_LOOKS = 1.0, 5
# And for this share of the budget at most.
LOOKING = 0.1


@dataclass(frozen=True)
class Task:
    """What a step does with its models, and what a plan for it aims at.

    `model` is the first one's class; `inputs` are the shapes and dtypes of the tensors that the
    first call of a model got; `optimizers` those that the step has; `trains` whether one of them
    made a step; `kept` are the optimizations that it was to leave as they are.
    """

    model: str = ""
    inputs: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()
    trains: bool = False
    objective: str = "time"
    steps: int | None = None
    kept: tuple[str, ...] = ()

    def key(self) -> str:
        """The same for the same task."""
        return json.dumps(asdict(self), sort_keys=True)


def setting(models: Sequence[torch.nn.Module], hardware: Hardware) -> str:
    """A fingerprint of the models' structure, shapes and dtypes, of the machine and of torch.

    Values of parameters are no part of it. The models must be in their original state. What was
    measured here for another machine's plans holds on this one, for those plans.
    """
    import torch

    device = Facts.read(models[0]).device
    machines = [hardware, Hardware.detect()] if hardware.pinned else [hardware]
    lines = [line for machine in machines for line in (describe(machine, device), machine.torch)]
    lines.append(str(torch.get_num_threads()))
    for model in map(unwrapped, models):
        for name, module in model.named_modules():
            lines.append(f"{name} {type(module).__qualname__} {_extra(module)}")
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            shape = tuple(getattr(tensor, "shape", ()))
            lines.append(f"{name} {shape} {tensor.dtype} {tensor.device} {tensor.requires_grad}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def identify(
    step: Step,
    hardware: Hardware,
    objective: str,
    steps: int | None,
    took_s: list[float] | None = None,
    budget: Budget | None = None,
    kept: tuple[str, ...] = (),
    attention: dict[Call, Seen] | None = None,
) -> tuple[str, Task]:
    """The setting and the task of a step. Runs it once, undone at its end; raises what it raises.

    A short step runs some times, as the `budget` allows, since the first one is slower; `took_s`
    gets the seconds of each, `attention` the calls of scaled_dot_product_attention.
    A model that was compiled by the user runs no hooks: its inputs stay unknown.
    """
    __tracebackhide__ = True
    calls: list[tuple[str, ...]] = []
    stepped: list[bool] = []
    times_s = [] if took_s is None else took_s
    with ExitStack() as stack:
        for model in step.models:
            stack.enter_context(hidden(model))
        where = setting(step.models, hardware)
        facts = Facts.read(step.models[0], step.optimizers)
        watched = step.models if facts.compiled == "no" else ()
        looked_at = nullcontext() if attention is None or not watched else noted_in(attention)
        start = stack.enter_context(step.guarded()).state
        contexts = [prepare(model, None, step.holders(model)) for model in step.models]
        runner = Runner(step, contexts, Record("baseline"))
        noted = optimizer_hooks(lambda *_: stepped.append(True), ours=step.optimizers)
        short_s = SHORT_S if budget is None else min(SHORT_S, LOOKING * budget.seconds)
        with runner.applied():
            with (
                noted, looked_at, _watched(watched, calls),
                optimizers_made(step.models) as made,
            ):  # fmt: skip
                times_s.append(clock.timed(runner.once, runner.device))
            step.made = step.made or made
            while sum(times_s) < short_s and len(times_s) < MOST_LOOKS:
                times_s.append(clock.timed(runner.once, runner.device))
            runner.warm = runner.state()
        if step.repeats is None and repeats.is_suspicious(times_s[0], min(times_s)):
            step.repeats = repetition.of_runner(runner, start)
        if step.afresh:
            times_s[:] = [runner.restarted(start)]
    optimizers = tuple(map(str, facts.stepped_by(step.made).optimizers))
    inputs = calls[0] if calls else ()
    name = type(unwrapped(step.models[0])).__name__
    return where, Task(name, inputs, optimizers, bool(stepped), objective, steps, kept)


@contextmanager
def _watched(models: Sequence[torch.nn.Module], calls: list[tuple[str, ...]]) -> Iterator[None]:
    """Notes the first call's tensors, in this thread."""
    here = threading.get_ident()

    def called(module: Any, args: Any, kwargs: Any) -> None:
        if is_here(here):
            calls.append(_tensors((args, kwargs)))

    handles: list[Any] = [
        model.register_forward_pre_hook(called, with_kwargs=True) for model in models
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _tensors(values: Any) -> tuple[str, ...]:
    """`32x3x224x224 float32` for every tensor in there."""
    import torch

    return tuple(
        f"{'x'.join(map(str, leaf.shape)) or 'scalar'} {str(leaf.dtype).removeprefix('torch.')}"
        for leaf in tree_leaves(values)
        if isinstance(leaf, torch.Tensor)
    )


def _extra(module: torch.nn.Module) -> str:
    try:
        return module.extra_repr()
    except Exception:  # the user's own code: a fingerprint is no reason to fail
        return ""

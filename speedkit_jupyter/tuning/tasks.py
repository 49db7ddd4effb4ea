"""What a plan is learned for: the models and the machine, and what a step does with them."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.measure.results.record import Record
from speedkit_jupyter.measure.rounds import clock
from speedkit_jupyter.measure.rounds.budget import Budget
from speedkit_jupyter.measure.rounds.confinement import optimizer_hooks
from speedkit_jupyter.measure.rounds.runner import Runner, compared_calls
from speedkit_jupyter.measure.subject import repeats
from speedkit_jupyter.measure.subject.repeats import optimizers_made
from speedkit_jupyter.measure.subject.step import Step
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.plans.applying import hidden, prepare
from speedkit_jupyter.plans.planning import describe
from speedkit_jupyter.support.thread_origin import is_here
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
        """Return the same for the same task."""
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True)
class Looked:
    """What single steps show: the `setting`, the task, and the seconds of the fastest one."""

    setting: str
    task: Task
    step_s: float


def setting(models: Sequence[torch.nn.Module], hardware: Hardware) -> str:
    """Return a fingerprint of the models' structure, shapes and dtypes, of the machine and of
    torch; the same for each order of the models.

    Values of parameters are no part of it. The models must be in their original state. What was
    measured here for another machine's plans holds on this one, for those plans.
    """
    import torch

    device = Facts.read(models[0]).device
    machines = [hardware, Hardware.detect()] if hardware.pinned else [hardware]
    lines = [line for machine in machines for line in (describe(machine, device), machine.torch)]
    lines += [str(torch.get_num_threads()), *sorted(map(_structure, map(unwrapped, models)))]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _structure(model: torch.nn.Module) -> str:
    modules = [f"{n} {type(m).__qualname__} {_extra(m)}" for n, m in model.named_modules()]
    tensors = [
        f"{name} {tuple(getattr(one, 'shape', ()))} {one.dtype} {one.device} {one.requires_grad}"
        for name, one in (*model.named_parameters(), *model.named_buffers())
    ]
    return "\n".join([*modules, *tensors])


def _extra(module: torch.nn.Module) -> str:
    try:
        return module.extra_repr()
    except Exception:  # the user's own code: a fingerprint is no reason to fail
        return ""


def look(step: Step, hardware: Hardware, budget: Budget | None = None) -> Looked:
    """Run a step, undone at its end; a short one some times, as the `budget` allows, since the
    first one is slower. Raises what it raises.

    A model that was compiled by the user runs no hooks: its inputs stay unknown.
    """
    __tracebackhide__ = True
    calls: list[tuple[str, ...]] = []
    stepped: list[bool] = []
    with ExitStack() as stack:
        for model in step.models:
            stack.enter_context(hidden(model))
        where = setting(step.models, hardware)
        facts = Facts.read(step.models[0], step.optimizers)
        watched = step.models if facts.compiled == "no" else ()
        start = stack.enter_context(step.guarded()).state
        contexts = [prepare(model, None, step.holders(model)) for model in step.models]
        runner = Runner(step, contexts, Record("baseline"))
        short_s = SHORT_S if budget is None else min(SHORT_S, LOOKING * budget.seconds)
        with runner.applied():
            with (
                optimizer_hooks(lambda *_: stepped.append(True), ours=step.optimizers),
                _watched(watched, calls),
                optimizers_made(step.models) as made,
            ):
                times_s = [clock.timed(runner.once, runner.device)]
            step.made = step.made or made
            while sum(times_s) < short_s and len(times_s) < MOST_LOOKS:
                times_s.append(clock.timed(runner.once, runner.device))
            runner.warm = runner.state()
        if step.repeats is None and repeats.is_suspicious(times_s[0], min(times_s)):
            step.repeats = compared_calls(runner, start)
        if step.afresh:
            times_s = [runner.restarted(start)]
    task = Task(
        type(unwrapped(step.models[0])).__name__,
        calls[0] if calls else (),
        tuple(map(str, facts.stepped_by(step.made).optimizers)),
        bool(stepped),
    )
    return Looked(where, task, min(times_s))


@contextmanager
def _watched(models: Sequence[torch.nn.Module], calls: list[tuple[str, ...]]) -> Iterator[None]:
    """Note the tensors of each call in this thread: `32x3x224x224 float32`."""
    import torch

    from speedkit_jupyter.support.torch_private import tree_leaves

    here = threading.get_ident()

    def called(module: Any, *given: Any) -> None:
        if is_here(here):
            tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
            shapes = ["x".join(map(str, tensor.shape)) or "scalar" for tensor in tensors]
            dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
            calls.append(tuple(map(" ".join, zip(shapes, dtypes, strict=True))))

    with ExitStack() as stack:
        for model in models:
            stack.callback(model.register_forward_pre_hook(called, with_kwargs=True).remove)
        yield

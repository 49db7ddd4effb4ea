"""Plans that were proven once: kept, found again for the same model, shapes and machine."""

from __future__ import annotations

import hashlib
import json
import math
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cache
from itertools import permutations
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.measure.checks.attention_calls import Seen
from speedkit_jupyter.measure.checks.attention_calls import noted as noted_in
from speedkit_jupyter.measure.results.comparison import Record
from speedkit_jupyter.measure.results.statistics import Ratio
from speedkit_jupyter.measure.rounds import clock
from speedkit_jupyter.measure.rounds.budget import Budget
from speedkit_jupyter.measure.rounds.confinement import optimizer_hooks
from speedkit_jupyter.measure.rounds.runner import Runner
from speedkit_jupyter.measure.subject import repeats
from speedkit_jupyter.measure.subject.in_use import used
from speedkit_jupyter.measure.subject.made_inside import made_inside
from speedkit_jupyter.measure.subject.step import Step
from speedkit_jupyter.measure.subject.variants import named
from speedkit_jupyter.optimizations.attention.timings import Call
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.plans.applying import hidden, prepare
from speedkit_jupyter.plans.config import SpeedConfig
from speedkit_jupyter.plans.planning import Plan, describe
from speedkit_jupyter.support import arguments, database
from speedkit_jupyter.support.exceptions import ArgumentError, SpeedKitError
from speedkit_jupyter.support.threads import is_here
from speedkit_jupyter.support.wrappers import unwrapped

if TYPE_CHECKING:
    import torch


EARLIER = (
    "a plan that an earlier version of SpeedKit learned for this model is not used: its "
    "measurements can't be trusted; %%speedbench --tune searches again"
)
# A step is looked at again until that took so long, or so often.
SHORT_S, MOST_LOOKS = 1.0, 5
# And for this share of the budget at most.
LOOKING = 0.1
# A fingerprint is of models in an order; of more than so many only the given one is looked for.
MOST_ORDERED = 4


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
        start = stack.enter_context(step.isolated()).state
        contexts = [prepare(model, None, step.holders(model)) for model in step.models]
        runner = Runner(step, contexts, Record("baseline"))
        noted = optimizer_hooks(lambda *_: stepped.append(True), ours=step.optimizers)
        short_s = SHORT_S if budget is None else min(SHORT_S, LOOKING * budget.seconds)
        with runner.applied():
            with (
                used(start), noted, looked_at, _watched(watched, calls),
                made_inside(step.models) as made,
            ):  # fmt: skip
                times_s.append(clock.timed(runner.once, runner.device))
            step.made = step.made or made
            while sum(times_s) < short_s and len(times_s) < MOST_LOOKS:
                times_s.append(clock.timed(runner.once, runner.device))
            runner.warm = runner.state()
        if step.repeats is None and repeats.is_suspicious(times_s[0], min(times_s)):
            step.repeats = repeats.of_runner(runner, start)
        if step.afresh:
            times_s[:] = [runner.restarted(start)]
    optimizers = tuple(map(str, facts.stepped_by(step.made).optimizers))
    inputs = calls[0] if calls else ()
    name = type(unwrapped(step.models[0])).__name__
    return where, Task(name, inputs, optimizers, bool(stepped), objective, steps, kept)


def find(where: str, task: Task) -> database.Learned | None:
    """The plan that was learned for this very setting and task. Raises SpeedKitError."""
    entries = database.learned(where)
    return next((o for o in entries if o.task == task.key() and not o.is_earlier), None)


def newest(
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    hardware: Hardware,
) -> database.Learned | None:
    """The last plan that was learned for models of one step, whatever went in and in which order
    they are given; training ones where there is an optimizer.
    """
    if not database.learned():  # a fingerprint takes time, too
        return None
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(hidden(model))
        orders = permutations(models) if len(models) <= MOST_ORDERED else [tuple(models)]
        found = [one for order in orders for one in database.learned(setting(order, hardware))]
    able = [entry for entry in found if not _costs_time(entry.plan)]
    every = sorted(able, key=lambda entry: entry.number)
    entries = [entry for entry in every if not entry.is_earlier]
    if every and not entries:
        _say_once(EARLIER, str(database.folder()))
    fitting = [entry for entry in entries if entry.plan["trains"] == bool(optimizers)]
    # What did not help in inference may help in training, and the other way round.
    fallback = [entry for entry in entries if entry.plan["values"]]
    return next(reversed(fitting or fallback), None)


def _costs_time(plan: Mapping[str, Any]) -> bool:
    """Whether it saves memory for time, as only those want it who ask for just that."""
    return plan.get("objective") == "memory" and (plan["speedup"] or 1.0) < 1


@cache
def _say_once(text: str, where: str) -> None:
    """In a session, and for one store."""
    warnings.warn(text, stacklevel=4)


def keep(
    where: str, task: Task, plan: Plan, values: Mapping[str, Any], name: str, ratio: Ratio | None
) -> None:
    """Remember a plan (its config values and variant name) with its proof.

    No values say that nothing helped. Raises SpeedKitError where the store can't be written.
    """
    measured_on = Hardware.detect() if plan.hardware.pinned else plan.hardware
    database.learn(
        where,
        task.key(),
        {
            "name": name,
            "values": dict(values),
            "speedup": None if ratio is None else ratio.median,
            "low": None if ratio is None else ratio.low,
            "high": None if ratio is None or ratio.high == float("inf") else ratio.high,
            "parameters": plan.facts.parameters,
            "device": describe(measured_on, plan.facts.device),
            "torch": measured_on.torch,
            **asdict(task),
        },
    )


def config_of(learned: database.Learned) -> SpeedConfig:
    """The plan as a config: what it names and no more, its decisions `measured`."""
    if not learned.plan["values"]:
        return SpeedConfig().alone(f"left as it is: nothing was proven faster {_when(learned)}")
    config = named(learned.plan["name"], learned.plan["values"]).config
    assert config is not None
    return config.with_source("measured", why(learned))


def why(learned: database.Learned) -> str:
    """The number behind it, when it was found and for which inputs."""
    plan = learned.plan
    text = proof(plan["name"], plan["speedup"], plan["low"], plan["high"])
    return f"{text} {_when(learned)}"


def _when(learned: database.Learned) -> str:
    inputs = ", ".join(learned.plan["inputs"]) or "inputs unknown"
    return f"on {learned.learned_at.astimezone().date().isoformat()} ({inputs})"


def proof(name: str, speedup: float | None, low: float | None, high: float | None) -> str:
    """`measured: bf16+compile 1.31x [1.25, 1.38]`."""
    if speedup is None:
        return f"measured: {name}"
    upper = "" if high is None or math.isinf(high) else f"{high:.2f}"
    return f"measured: {name} {speedup:.2f}x [{low:.2f}, {upper}]"


def or_learned(
    config: SpeedConfig,
    model: torch.nn.Module | Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer] = (),
) -> SpeedConfig:
    """What applying goes by: where nothing definite is asked for, the plan that was learned.

    Raises SpeedKitError where the store can't be read.
    """
    return (tuned(model, optimizers) if config.is_auto else None) or config


def tuned(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
) -> SpeedConfig | None:
    """The plan that tuning learned for this model on this machine, or None.

    For several models it is the plan of a step that uses them together. One that changes nothing
    where a search found that nothing helps.
    `apply_speedups(model, tuned(model), optimizer=optimizer)` applies it in well under a second.
    Raises SpeedKitError where the store can't be read, TypeError for what is no model.
    """
    import torch

    models: list[Any] = list(model) if isinstance(model, list | tuple) else [model]
    for one in models:
        if not isinstance(one, torch.nn.Module):
            raise ArgumentError(f"tuned() needs a torch.nn.Module, not {type(one).__name__}")
    if not models:
        raise ArgumentError("tuned() needs a torch.nn.Module, not an empty list")
    optimizers = arguments.optimizers("optimizer", optimizer)
    learned = newest(models, optimizers, Hardware.current())
    return None if learned is None else config_of(learned)


def forget(learned: database.Learned) -> None:
    """Drop a plan that does not hold; a store that can't be written is no reason to stop."""
    try:
        database.unlearn([learned.number])
    except SpeedKitError:
        return


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
    from torch.utils._pytree import tree_leaves

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

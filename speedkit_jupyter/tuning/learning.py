"""Plans that were proven once: kept, found again for the same model, shapes and machine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.measure.results.statistics import Ratio
from speedkit_jupyter.measure.subject.variants import named
from speedkit_jupyter.plans.applying import hidden
from speedkit_jupyter.plans.config import SpeedConfig
from speedkit_jupyter.plans.planning import Plan, describe
from speedkit_jupyter.support import arguments, database
from speedkit_jupyter.support.exceptions import ArgumentError
from speedkit_jupyter.support.tracebacks import hide_internal_frames
from speedkit_jupyter.tuning.tasks import Task, setting

if TYPE_CHECKING:
    import torch


def find(where: str, task: Task) -> database.Learned | None:
    """The plan that was learned for this very setting and task. Raises SpeedKitError."""
    entries = database.learned(where)
    return next((o for o in entries if o.task == task.key() and not o.is_earlier), None)


def newest(
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    hardware: Hardware,
) -> database.Learned | None:
    """Return the last plan that was learned for models of one step, whatever went in; of training
    ones where there is an optimizer.
    """
    if not database.learned():  # a fingerprint takes time, too
        return None
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(hidden(model))
        entries = database.learned(setting(models, hardware))
    entries = [e for e in entries if not e.is_earlier and not _is_about_memory_alone(e.plan)]
    fitting = [entry for entry in entries if entry.plan["trains"] == bool(optimizers)]
    # What did not help in inference may help in training, and the other way round.
    fallback = [entry for entry in entries if entry.plan["values"]]
    return next(reversed(fitting or fallback), None)


def _is_about_memory_alone(plan: Mapping[str, Any]) -> bool:
    """Whether it saves memory for time, as only those want it who ask for just that; or says that
    nothing saves memory, which says nothing about time.
    """
    is_for_memory = str(plan.get("objective")).startswith("memory")
    return is_for_memory and (not plan["values"] or (plan["speedup"] or 1.0) < 1)


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
    if not low or high is None or math.isinf(high):
        return f"measured: {name} about {speedup:.2f}x"
    return f"measured: {name} {speedup:.2f}x [{low:.2f}, {high:.2f}]"


def or_learned(
    config: SpeedConfig,
    model: torch.nn.Module | Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer] = (),
) -> SpeedConfig:
    """What applying goes by: where nothing definite is asked for, the plan that was learned.

    Raises SpeedKitError where the store can't be read.
    """
    return (tuned(model, optimizers) if config.is_auto else None) or config


@hide_internal_frames
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
    for model in models:
        if not isinstance(model, torch.nn.Module):
            raise ArgumentError(f"tuned() needs a torch.nn.Module, not {type(model).__name__}")
    if not models:
        raise ArgumentError("tuned() needs a torch.nn.Module, not an empty list")
    optimizers = arguments.optimizers("optimizer", optimizer)
    learned = newest(models, optimizers, Hardware.current())
    return None if learned is None else config_of(learned)

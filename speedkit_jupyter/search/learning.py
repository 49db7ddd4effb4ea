"""Store the plan that a search found, and find it for the same models, shapes and machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch.nn import Module
from torch.optim import Optimizer

from speedkit_jupyter.catalog import CATALOG
from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.plans.config import SpeedConfig
from speedkit_jupyter.plans.context import hidden
from speedkit_jupyter.plans.planning import Plan
from speedkit_jupyter.right.reference import noted_autocast
from speedkit_jupyter.rounds.runner import Runner
from speedkit_jupyter.rounds.statistics import Ratio
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.step.variants import of_values
from speedkit_jupyter.step.watching import Watcher, watching
from speedkit_jupyter.support import arguments, database
from speedkit_jupyter.support.exceptions import ConfigError
from speedkit_jupyter.support.tracebacks import hide_internal_frames
from speedkit_jupyter.support.units import between, ratio
from speedkit_jupyter.support.wrappers import unwrapped
from speedkit_jupyter.torchglue.confinement import optimizer_hooks
from speedkit_jupyter.torchglue.storage import tensors_in


@dataclass(frozen=True)
class Task:
    """The work of a step, as the key of its learned plan.

    `model` is the first model's class name, and `inputs` has the inputs' shapes and dtypes.
    `trains` is True if an optimizer stepped. `kept` has the optimizations to leave unchanged.
    """

    model: str = ""
    inputs: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()
    trains: bool = False
    kept: tuple[str, ...] = ()

    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


class TaskFacts(NamedTuple):
    """Facts from a step's first calls; `autocast` has the 16-bit dtypes of the user's autocast."""

    setting: str
    task: Task
    facts: list[Facts]
    autocast: set[str]


def setting(models: Sequence[Module], hardware: Hardware) -> str:
    """Return a fingerprint of models (structure, shapes, dtypes), machine and torch version.

    It includes the number of threads and the user's kernels. The models' plans must be hidden.
    Plans for another machine are measured on this one, so the fingerprint has both machines.
    """
    device = Facts.read(models[0]).device
    machines = [hardware, Hardware.detect()] if hardware.pinned else [hardware]
    lines = [machine.fingerprint(device) for machine in machines]
    lines += [str(torch.get_num_threads()), *sorted(map(_structure, map(unwrapped, models)))]
    own = (entry.fingerprint(model) for entry in CATALOG for model in models)
    lines += sorted(filter(None, own))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _structure(model: Module) -> str:
    try:
        text = repr(model)
    except Exception:  # the user's code may raise anything, which must not stop the search
        text = type(model).__qualname__
    tensors = [
        f"{name} {tuple(getattr(one, 'shape', ()))} {one.dtype} {one.device} {one.requires_grad}"
        for name, one in (*model.named_parameters(), *model.named_buffers())
    ]
    return "\n".join([text, *tensors])


def inputs(args: Any, kwargs: Any) -> tuple[str, ...]:
    """Return shapes and dtypes of a model's inputs, such as `32x3x224x224 float32`."""
    tensors = tensors_in((args, kwargs))
    shapes = ["x".join(map(str, tensor.shape)) or "scalar" for tensor in tensors]
    dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
    return tuple(map(" ".join, zip(shapes, dtypes, strict=True)))


def inputs_of_calls(calls: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the inputs of the first call, with `*` for each size that differs in other calls.

    If calls differ in the number of tensors, ranks or dtypes, only the first call counts. The first
    dimension keeps its size: it is the batch size, which may be smaller in the last batch.
    """
    parts = [[one.partition(" ") for one in call] for call in calls]
    forms = {tuple((shape.count("x"), dtype) for shape, _, dtype in call) for call in parts}
    found = []
    for of_each in zip(*parts if len(forms) == 1 else parts[:1], strict=True):
        (rows, *_), *lengths = zip(*(shape.split("x") for shape, _, _ in of_each), strict=True)
        sizes = [rows, *(some[0] if len({*some}) == 1 else "*" for some in lengths)]
        found.append(f"{'x'.join(sizes)} {of_each[0][2]}")
    return tuple(found)


class StepReader(Watcher):
    """Read the facts of a step from the calls that are made inside `watching`."""

    def __init__(self, step: Step, hardware: Hardware) -> None:
        self._step, self._hardware, self._trains = step, hardware, False
        self._inputs: dict[tuple[str, ...], None] = {}  # one entry if there are several models
        self._decodes = False
        self._autocast: set[str] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record optimizer steps, autocast dtypes and, if the first model isn't compiled, calls."""
        is_compiled = Facts.read(self._step.models[0]).compiled != "no"
        with (
            optimizer_hooks(self._stepped, ours=self._step.optimizers),
            watching(() if is_compiled else self._step.models, self),
            noted_autocast() as self._autocast,
        ):
            yield

    def _stepped(self, *_: Any) -> None:
        self._trains = True

    def called(self, args: Any, kwargs: Any, result: Any) -> None:
        if not self._inputs or len(self._step.models) == 1:
            self._inputs[inputs(args, kwargs)] = None
        self._decodes = self._decodes or kwargs.get("past_key_values") is not None

    def facts(self, runner: Runner) -> TaskFacts:
        """Return the step's facts, after its first calls by the baseline's `runner`."""
        step, made = self._step, runner.facts.made
        facts = [Facts.read(one, step.holders(one)).stepped_by(made) for one in step.models]
        optimizers = tuple(str(optimizer) for one in facts for optimizer in one.optimizers)
        name, read = type(unwrapped(step.models[0])).__name__, inputs_of_calls([*self._inputs])
        known: dict[str, Any] = {"lengths_vary": "*" in " ".join(read), "decodes": self._decodes}
        known |= {"step_s": runner.usual_s, "fresh_bytes": runner.fresh_bytes.get(False, 0)}
        facts = [replace(one, **known) for one in facts]
        task = Task(name, read, optimizers, self._trains)
        return TaskFacts(setting(step.models, self._hardware), task, facts, self._autocast)


def find(where: str, task: Task) -> database.Kept | None:
    """Return the usable plan for a task and a fingerprint `where` (see `setting`), or None."""
    entries = database.learned(where)
    return next((e for e in entries if e.task == task.key() and is_usable(e)), None)


def newest(
    models: Sequence[Module], optimizers: Sequence[Optimizer], hardware: Hardware
) -> database.Kept | None:
    """Return the newest usable plan, or None. Plans for training come first with `optimizers`."""
    if not database.learned():  # avoids computing a fingerprint
        return None
    with hidden(*models):
        entries = database.learned(setting(models, hardware))
    entries = list(filter(is_usable, entries))
    fitting = [e for e in entries if e.value["trains"] == bool(optimizers)]
    # An empty plan for training says nothing about inference, nor the other way round.
    return next(reversed(fitting or [e for e in entries if e.value["values"]]), None)


def is_usable(learned: database.Kept) -> bool:
    """Return whether the current engine version found the plan, and all its options are valid."""
    with suppress(ConfigError):
        return not learned.is_earlier and config_of(learned) is not None
    return False


def store(
    where: str, task: Task, plan: Plan, values: Mapping[str, Any], name: str, ratio: Ratio | None
) -> None:
    """Store a plan with its proof; if none helped, an empty plan. May raise SpeedKitError."""
    measured_on = Hardware.detect() if plan.hardware.pinned else plan.hardware
    found = {"name": name, "values": dict(values), "parameters": plan.facts.parameters}
    proof = ratio.to_dict() if ratio else dict.fromkeys(("median", "low", "high"))
    found |= {"speedup": proof["median"], "low": proof["low"], "high": proof["high"]}
    found |= {"device": measured_on.describe(plan.facts.device), "torch": measured_on.torch}
    database.learn(where, task.key(), found | asdict(task))


def config_of(learned: database.Kept) -> SpeedConfig:
    """Return the plan as a config, with its proof as the reason; an empty plan changes nothing."""
    plan, day = learned.value, learned.saved_at.astimezone().date().isoformat()
    when = f"on {day} ({', '.join(plan['inputs']) or 'inputs unknown'})"
    if not plan["values"]:
        return SpeedConfig().alone(f"left as it is: nothing was proven faster {when}")
    config = cast(SpeedConfig, of_values(plan["name"], plan["values"]).config)
    return config.with_source("measured", f"measured: {plan['name']} {gain(plan)} {when}")


def gain(plan: Mapping[str, Any]) -> str:
    """Return the speed-up as `1.31× (1.25× to 1.38×)` or `too few rounds`; empty if unknown."""
    speedup, low, high = (plan.get(key) for key in ("speedup", "low", "high"))
    if speedup is None:
        return ""
    return f"{ratio(speedup)} ({between(low, high)})" if low and high else "too few rounds"


@hide_internal_frames
def tuned(
    model: Module | Sequence[Module], optimizer: Optimizer | Sequence[Optimizer] = ()
) -> SpeedConfig | None:
    """Return the newest plan that tuning learned for this model, machine and torch version.

    Args:
        model: the model, or all models of the step that was tuned.
        optimizer: the optimizers of a training step; without them, plans for inference come first.

    Returns:
        A SpeedConfig (it changes nothing if no plan helped), or None if no plan was learned.

    Raises:
        ArgumentError: `model` is not a torch.nn.Module, or `optimizer` not a torch optimizer.
        SpeedKitError: the store of learned plans can't be read.

    Example::

        model, ctx = apply_speedups(model, tuned(model, optimizer), optimizer=optimizer)
    """
    models: list[Any] = list(model) if isinstance(model, list | tuple) else [model]
    for one in models or [None]:
        arguments.model("tuned() needs", one)
    learned = newest(models, arguments.optimizers("optimizer", optimizer), Hardware.current())
    return None if learned is None else config_of(learned)

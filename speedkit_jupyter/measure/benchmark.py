"""The benchmark: variants of one step, interleaved in shuffled rounds, then everything put back."""

from __future__ import annotations

import gc
import inspect
import math
import random
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.context import hidden, prepare
from speedkit_jupyter.exceptions import SpeedKitError, StepError
from speedkit_jupyter.facts import has_lazy_parameters
from speedkit_jupyter.measure import accuracy, clock
from speedkit_jupyter.measure.accuracy import Observation
from speedkit_jupyter.measure.comparison import Comparison, Record
from speedkit_jupyter.measure.isolation import State
from speedkit_jupyter.measure.reach import (
    bystanders_among,
    optimizers_among,
    others_among,
    outermost,
    reached,
)
from speedkit_jupyter.measure.runner import Runner
from speedkit_jupyter.measure.statistics import planned_looks
from speedkit_jupyter.measure.step import Step
from speedkit_jupyter.measure.variants import CURRENT, Variant, variant
from speedkit_jupyter.planning import describe

if TYPE_CHECKING:
    import torch

# A block of steps lasts at least this long, so that the clock's resolution is no part of it.
BLOCK_S = 0.002
# Warm-up ends when two neighbouring steps differ by less than this, or after so many steps.
STABLE, MOST_WARM_UP = 0.2, 12
MOST_ROUNDS = 20_000


@dataclass(frozen=True)
class Progress:
    """Where a benchmark is: `done` of the budget (0 to 1), and in words."""

    done: float
    text: str


class Benchmark:
    """Measures a step under several variants. Drain `run()`, then read `result()`.

    Whatever happens, models, optimizers, random generators and names end as they began.
    """

    def __init__(self, step: Step, variants: Sequence[Variant], budget_s: float = 10.0) -> None:
        if not step.models:
            raise StepError("no model is used in this step, so there is nothing to vary")
        if any(map(has_lazy_parameters, (*step.models, *step.bystanders))):
            raise StepError("lazy layers have no shape yet: run one forward pass before")
        if not budget_s > 0:
            raise StepError(f"the budget must be a positive number of seconds, not {budget_s:g}")
        self.step, self.variants, self.budget_s = step, tuple(variants), float(budget_s)
        self._records = [Record(one.name) for one in self.variants]
        self._looks: tuple[int, ...] = (1,)
        self._round_s: float | None = None
        self._shortest_s = math.inf
        self._environment: dict[str, Any] = {}

    def result(self) -> Comparison:
        """What is known so far."""
        return Comparison(
            tuple(self._records), self._environment, self.budget_s, len(self._looks), self._round_s
        )

    def run(self) -> Generator[Progress, None, None]:
        """Measure; yields after every block. Closing the generator ends it and puts all back."""
        __tracebackhide__ = True
        step = self.step
        configs = [_config(one, step) for one in self.variants]
        with ExitStack() as stack:
            # Hidden first: settings of a plan in force are no part of what to come back to.
            for model in step.models:
                stack.enter_context(hidden(model))
            start = stack.enter_context(step.isolated())
            runners = [self._runner(i, config) for i, config in enumerate(configs)]
            self._environment = _environment(runners[0])
            yield from self._warm_up(_working(runners), start)
            yield from self._check(_working(runners), start)
            yield from self._rounds(_working(runners))

    def _runner(self, index: int, config: Any) -> Runner:
        record = self._records[index]
        contexts = [prepare(m, config, self.step.holders(m)) for m in self.step.models]
        plan = contexts[0].plan
        record.applied = {d.name: d.value for d in plan if d.active}
        record.notes = {d.name: f"declined: {d.reason}" for d in plan if d.declined}
        if config is not None and not record.applied and index > 0:
            _nothing_to_measure(record)
        return Runner(self.step, contexts, record)

    def _warm_up(self, runners: Sequence[Runner], start: State) -> Iterator[Progress]:
        __tracebackhide__ = True
        for number, runner in enumerate(runners):
            name = runner.record.name
            yield Progress(0.0, f"warming up {name} ({number + 1} of {len(runners)})")
            try:
                with runner.applied():
                    self._warm_up_one(runner)
                    runner.warm = runner.state()
            except Exception as error:
                if number == 0:  # the step itself is wrong: the user's error, as it is
                    raise
                _note_failure(runner.record, error)  # a row; the others go on
            # Back to the user's values, so that every variant warms up from the same ones.
            start.restore()

    def _warm_up_one(self, runner: Runner) -> None:
        __tracebackhide__ = True
        device = runner.contexts[0].device
        record = runner.record
        record.first_call_s = clock.timed(runner.once, device)
        last = record.first_call_s
        for count in range(MOST_WARM_UP):
            now = clock.timed(runner.once, device)
            if count and abs(now - last) < STABLE * last:
                break
            last = now
        record.notes.update({k: v for one in runner.contexts for k, v in one.notes.items()})
        record.times_s = []
        self._shortest_s = min(self._shortest_s, now)

    def _check(self, runners: Sequence[Runner], start: State) -> Iterator[Progress]:
        """One step of each variant against the same step in float64."""
        __tracebackhide__ = True
        models = self.step.models
        with accuracy.without_dropout(models):
            yield Progress(0.0, "checking what is computed")
            reference, is_random = self._reference(runners[0], start)
            baseline = None
            for runner in runners:
                start.restore()  # before the plan is applied: settings are part of the state
                try:
                    with runner.applied():
                        seen = runner.observed()
                except Exception as error:
                    _note_failure(runner.record, error)
                    continue
                finally:
                    start.restore()
                baseline = seen if baseline is None else baseline
                runner.record.accuracy = accuracy.judge(
                    seen, reference or baseline, baseline, runner.precision, is_random
                )
                yield Progress(0.0, f"checked {runner.record.name}")

    def _reference(self, runner: Runner, start: State) -> tuple[Observation | None, bool]:
        """The step in float64 (None where the model can't), and whether it is random."""
        import torch

        seen = []
        try:
            for seed in (None, 1):  # another draw: only a random step answers to it
                start.restore()
                if seed is not None:
                    torch.manual_seed(seed)
                with runner.applied(), accuracy.in_float64(self.step.models):
                    seen.append(runner.observed(stop_at_step=True))
        except Exception:  # an operation without float64, or code that asks for float32
            return None, False
        finally:
            start.restore()
        return seen[0], accuracy.differ(*seen)

    def _rounds(self, runners: Sequence[Runner]) -> Iterator[Progress]:
        length = max(1, math.ceil(BLOCK_S / self._shortest_s))
        order = random.Random(0)  # not the user's generator, which is being kept
        start = time.perf_counter()
        for number in range(1, MOST_ROUNDS + 1):
            times = {}
            for runner in order.sample(list(runners), len(runners)):
                times[id(runner)] = self._block(runner, length)
                done = min((time.perf_counter() - start) / self.budget_s, 1.0)
                yield Progress(done, self._words(number, runner))
            for runner in runners:  # whole rounds only: pairs stay pairs
                runner.record.times_s.append(times[id(runner)])
            elapsed = time.perf_counter() - start
            self._round_s = elapsed / number
            if number == 1:  # planned before anything is seen, so that looking costs its due
                self._looks = planned_looks(int(self.budget_s / elapsed))
            if elapsed >= self.budget_s or (number in self._looks and self.result().settled()):
                break

    def _words(self, number: int, runner: Runner) -> str:
        """Variant, round and time left."""
        left = self.budget_s - (self._round_s or 0) * (number - 1)
        return f"round {number}, {runner.record.name}, at most {max(left, 0):.0f} s left"

    def _block(self, runner: Runner, length: int) -> float:
        """Seconds of one step, over a block that starts from the variant's warm state."""
        assert runner.warm is not None
        device = runner.contexts[0].device
        with runner.applied():
            runner.warm.restore()
            runner.once()  # untimed: caches and clocks settle after the switch
            return sum(clock.timed(runner.once, device) for _ in range(length)) / length


def _working(runners: Sequence[Runner]) -> list[Runner]:
    return [one for one in runners if not one.record.failure and not one.record.same_as_baseline]


def _nothing_to_measure(record: Record) -> None:
    """A plan that changes nothing is the baseline; a wish that was declined is no variant."""
    if record.notes:
        record.failure = "; ".join(f"{name} {note}" for name, note in record.notes.items())
        record.notes = {}
    else:
        record.same_as_baseline = True


def _config(one: Variant, step: Step) -> Any:
    """The variant's config; `current` asks for what is applied to the model now."""
    if one.name != CURRENT:
        return one.config
    slot = step.models[0].__dict__.get("_speedkit_contexts")
    return slot[-1].plan.to_config() if slot else None


def _environment(runner: Runner) -> dict[str, Any]:
    hardware = runner.contexts[0].plan.hardware
    return {
        "device": describe(hardware, str(runner.contexts[0].device)),
        "torch": hardware.torch,
        "python": hardware.python,
        "system": hardware.system,
    }


def _note_failure(record: Record, error: Exception) -> None:
    """One line, and nothing of the failed step kept alive by its traceback."""
    first = (str(error).strip().splitlines() or [""])[0]
    ours = isinstance(error, SpeedKitError)
    record.failure = first if ours else f"{type(error).__name__}: {first}"
    record.times_s = []
    traceback.clear_frames(error.__traceback__)
    error.__traceback__ = None
    gc.collect()


def benchmark(
    step: Callable[..., object],
    variants: str | Sequence[str] = ("baseline", "auto"),
    *,
    model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    budget_s: float = 10.0,
) -> Comparison:
    """Measure `step()` under several variants for `budget_s` seconds after warm-up.

    Models and optimizers that are not given are those that the function's code reaches. A step
    that takes one argument is given the variant's context: `def step(ctx)`. Raises StepError
    where it can't be measured; whatever happens, all that it changed is put back.
    """
    names = variants.split(",") if isinstance(variants, str) else variants
    takes_context = bool(inspect.signature(step).parameters)
    found = reached([step])
    models = outermost(found) if model is None else _listed(model)
    optimizers = optimizers_among(found) if optimizer is None else _listed(optimizer)
    whole = Step(
        step if takes_context else (lambda context: step()),
        models,
        optimizers,
        bystanders_among(found, [*models, *optimizers]),
        calls_context=takes_context,
        others=others_among(found),
    )
    measured = Benchmark(whole, [variant(name.strip()) for name in names], budget_s)
    for _ in measured.run():
        pass
    return measured.result()


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else [given]

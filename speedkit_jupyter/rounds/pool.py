"""Variants at work that the benchmarks of one search share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from speedkit_jupyter.plans.applying import hidden
from speedkit_jupyter.right.judge import StepJudge
from speedkit_jupyter.rounds.runner import Runner
from speedkit_jupyter.state.guard import MeasurementGuard
from speedkit_jupyter.step import memory
from speedkit_jupyter.step.repeats import UNKNOWN, StepFacts
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.torchglue import heap


@dataclass
class Pool:
    """The variants of a step, warmed up once and judged by one trace; all is undone at the end.

    `runners` are by the name of the variant, and hold a copy of the state each: `most_bytes` in all
    at most.
    """

    guard: MeasurementGuard
    most_bytes: int = 0
    runners: dict[str, Runner] = field(default_factory=dict)
    judge: StepJudge = field(default_factory=StepJudge)

    @property
    def facts(self) -> StepFacts:
        """Return the facts of the step, from any variant that ran."""
        known = (one.facts for one in self.runners.values() if one.facts.asked is not None)
        return next(known, UNKNOWN)

    def again(self, name: str) -> Runner | None:
        """Return the variant that is at work already, with a record for new rounds."""
        runner = self.runners.get(name)
        return None if runner is None else replace(runner, record=runner.record.anew())

    def add(self, runners: Iterable[Runner]) -> None:
        """Have these at work, in the place of others of their names."""
        self.runners |= {runner.record.name: runner for runner in runners}

    def keep(self, names: Collection[str], at_work: Collection[str]) -> None:
        """Let go of all others; of those that are not at work only the copies that they hold."""
        self.runners = {name: one for name, one in self.runners.items() if name in names}
        for name in self.runners.keys() - at_work:
            self.runners[name].drop_state()


@contextmanager
def pooled(step: Step, copies: int) -> Iterator[Pool]:
    """Undo at the end whatever the step does; there is room for `copies` of its state.

    Raises StepError while another step is measured.
    """
    heap.settle()
    heap.occupy_free_addresses()
    with ExitStack() as stack:
        stack.callback(heap.give_back)
        # Hidden first: settings of a plan in force are no part of what to come back to.
        for model in step.models:
            stack.enter_context(hidden(model))
        guarded = step.guarded(off_device=are_too_large(step, copies))
        yield Pool(stack.enter_context(guarded), copies * copy_bytes(step))


def are_too_large(step: Step, copies: int) -> bool:
    """Return whether the device has no room for this many copies of the step's state."""
    device = next((parameter.device for parameter in step.models[0].parameters()), None)
    return device is not None and not memory.fits(copies * copy_bytes(step), device)


def copy_bytes(step: Step) -> int:
    """Return the bytes of a copy of the step's state.

    Optimizer state that does not exist yet counts as the two tensors that Adam keeps.
    """
    state = memory.size(memory.state_tensors(step.models, step.optimizers))
    parameters = memory.size([p for module in step.models for p in module.parameters()])
    return max(state, 4 * parameters if step.optimizers else 0)

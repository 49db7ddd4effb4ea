"""The state of `auto` while it is on: find the loops of this thread, and race plans on each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.extras.auto.live import Work
from speedkit_jupyter.extras.auto.race import BASELINE
from speedkit_jupyter.extras.auto.steps import Discovery
from speedkit_jupyter.plans.context import is_measuring
from speedkit_jupyter.support import units
from speedkit_jupyter.support.exceptions import in_a_line
from speedkit_jupyter.torchglue.confinement import optimizer_hooks, patched

# Loops shorter than this many seconds get no line: without a proven plan, and with one.
LEAST_S, LEAST_PROVEN_S = 1.0, 0.1
# Default limit for the cost of races, as a share of the run.
OVERHEAD = 0.02


# State at module level, on purpose: the hooks belong to the process, and one session serves all.
RUNNING: list[Auto] = []


class Auto:
    """The races of plans on the loops of one thread: the thread that calls `begin`.

    Args:
        overhead: The share of the run that examinations and slower plans may cost at any moment.
        exact_evaluation: Whether calls without gradients always run without a plan.
        say: A function that gets each line for the user.
        changed: A function that is called with this object after each step.
    """

    def __init__(
        self,
        overhead: float = OVERHEAD,
        exact_evaluation: bool = False,
        say: Callable[[str], None] = print,
        changed: Callable[[Auto], None] | None = None,
    ) -> None:
        self.works: list[Work] = []
        self.latest: Work | None = None
        self.refused: dict[str, None] = {}
        self._options = overhead, exact_evaluation, say
        self.changed = changed
        self._here = threading.get_ident()
        self._stack = ExitStack()
        self._watching: ExitStack | None = None
        self._discovery = Discovery()
        self._ignored: set[int] = set()
        self.is_paused = False
        # The only model and optimizer to race plans for; None for each.
        self.only: tuple[torch.nn.Module | None, torch.optim.Optimizer | None] = None, None

    @property
    def is_here(self) -> bool:
        """Return whether it serves the calling thread."""
        return self._here == threading.get_ident()

    def begin(self) -> None:
        """Start to watch the loops of this thread."""
        RUNNING.append(self)
        stack = self._stack
        stack.enter_context(optimizer_hooks(after=self._after))
        stack.enter_context(patched(torch.autograd, "backward", self._noting_loss))
        self._discover()

    def end(self) -> None:
        """Restore every flag and object, and keep the trained parameters."""
        if self in RUNNING:
            RUNNING.remove(self)
        self._end_discovery()
        for work in self.works:
            work.end()
        self._stack.close()
        self._discovery = Discovery()
        self.works.clear()
        self.latest = None

    def pause(self, is_paused: bool = True) -> None:
        """Stop to race and to watch, with the winners in force; continue with `is_paused=False`."""
        self.is_paused = is_paused
        if is_paused:
            self._end_discovery()
            for work in self.works:
                work.pause()
                work.is_paused = True
        else:
            for work in self.works:
                work.is_paused = False
            self._discover()

    def begin_cell(self) -> None:
        """Reset the totals of all loops, and watch them again."""
        self.refused.clear()
        for work in self.works:
            work.begin_cell()
        self._ignored.clear()
        self.pause(False)

    def end_cell(self) -> list[str]:
        """End the race rounds of a cell; return one line for each of its loops."""
        for work in self.works:
            work.pause()
        self._end_discovery()
        lines = [line for work in self.works if (line := summary(work))]
        return [*lines, *self.refused]

    # The hooks.

    def _noting_loss(self, backward: Any) -> Callable[..., Any]:
        def call(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            backward(tensors, *args, **kwargs)
            for work in [] if self.is_paused else [*self.works]:
                self._safely(work, partial(work.differentiated, tensors))

        return call

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.is_paused or id(optimizer) in self._ignored:
            return
        work = self._work_of(optimizer)
        if work is None:
            if not is_measuring():
                self._discovered(optimizer)
            return
        self.latest = work
        self._safely(work, work.stepped)
        if self.changed is not None:
            self.changed(self)

    def _safely(self, work: Work, do: Callable[[], None]) -> None:
        """Call `do`; after an error of SpeedKit drop the loop, which goes on without a plan."""
        try:
            do()
        except Exception as error:
            self.works.remove(work)
            self._ignored.update(map(id, work.optimizers))
            work.end()
            self._refuse(work.optimizers, f"{in_a_line(error)}, which is a fault of SpeedKit")

    def _work_of(self, optimizer: torch.optim.Optimizer) -> Work | None:
        return next((work for work in self.works if optimizer in work.optimizers), None)

    # Discovery of new loops.

    def _discover(self) -> None:
        if self._watching is None and not self.is_paused:
            self._discovery = Discovery(self._predicts)
            self._watching = ExitStack()
            self._watching.enter_context(self._discovery.watching())

    def _end_discovery(self) -> None:
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.close()

    def _discovered(self, optimizer: torch.optim.Optimizer) -> None:
        """Note an optimizer step of a new loop; add the loop once its period is known."""
        self._discover()
        found = self._discovery
        found.stepped(optimizer)
        if (period := found.period) is None:
            return
        optimizers = list({id(one): one for one in found.optimizers}.values())
        models = [one for one in found.models.values() if held_by(optimizers, one)]
        self._end_discovery()
        if not period:
            self._refuse(optimizers, "its optimizers step in no regular order")
        elif not models:
            self._refuse(optimizers, "no call of a model was seen that its optimizer trains")
        else:
            self._add(models, optimizers, period, found.has_autocast)

    def _predicts(self, model: torch.nn.Module) -> None:
        """Add a model that only predicts, unless a known loop has it."""
        known = [one for work in self.works for one in work.live_models]
        if not is_measuring() and all(one is not model for one in known):
            self._add([model], [], 0)

    def _add(self, models: Any, optimizers: Any, period: int, has_autocast: bool = False) -> None:
        if not self._is_wanted(models, optimizers):
            self._ignored.update(map(id, optimizers))
            return None
        if any(Facts.read(model).compiled != "no" for model in models):
            return self._refuse(optimizers, "its model is compiled already")
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return self._refuse(optimizers, "several processes train it together")
        try:
            for known in [one for one in self.works if not one.trains]:
                if any(one is model for one in known.live_models for model in models):
                    self.works.remove(known)  # it predicted before it was trained
                    known.end()
            keep = ("precision",) if has_autocast else ()
            work = Work(models, optimizers, period, *self._options, keep=keep)
        except Exception as error:
            return self._refuse(optimizers, in_a_line(error))
        self.works.append(work)
        self.latest = work
        return None

    def _is_wanted(self, models: Any, optimizers: Any) -> bool:
        model, optimizer = self.only
        parts = [] if model is None else [*model.modules()]
        has_model = model is None or any(one is part for one in models for part in parts)
        return has_model and (optimizer is None or any(one is optimizer for one in optimizers))

    def _refuse(self, optimizers: Iterable[Any], why: str) -> None:
        self._ignored.update(map(id, optimizers))
        self.refused[f"auto leaves this loop as it is: {why}."] = None


def held_by(optimizers: Sequence[torch.optim.Optimizer], model: torch.nn.Module) -> bool:
    """Return whether one of the optimizers steps a parameter of the model."""
    own = {id(one) for one in model.parameters()}
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return any(id(one) in own for group in groups for one in group["params"])


def summary(work: Work) -> str:
    """Return the line that sums up a loop of a cell; empty if the loop was too short."""
    totals, race = work.totals, work.race
    steps, took_s = sum(totals.steps.values()), sum(totals.seconds.values())
    if took_s < (LEAST_S if race.proof is None else LEAST_PROVEN_S):
        return ""
    what = "steps" if work.trains else "calls"
    begun = f"{steps:,} {what} in {units.seconds(took_s)}"
    if race.proof is None:
        return f"{begun}: {_nothing(work)}"
    ratio = race.proof
    under = {name: s for name, s in totals.seconds.items() if name != BASELINE}
    plain_s = took_s + sum(under.values()) * (ratio.median - 1)
    gain = [
        1 + sum(under.values()) * (one - 1) / took_s
        for one in (ratio.median, ratio.low, ratio.high)
    ]
    line = (
        f"{begun}, about {units.seconds(plain_s)} without ({gain[0]:.2f}×, {gain[1]:.2f} to "
        f"{gain[2]:.2f}) by {race.leader}."
    )
    if totals.predictions:
        line += f" {totals.predictions:,} calls for evaluation ran under it too (--eval exact)."
    return f"{line} `%speedkit report` says why, `%speedkit code` takes it home."


def _nothing(work: Work) -> str:
    tried = len(work.race.tried)
    if work.race.is_settled:
        return f"nothing of {tried} plans was proven faster, so all is as it was."
    return (
        f"too short to prove one of {tried + len(work.race.waiting)} plans; the next run goes on."
    )


def live_line(work: Work) -> str:
    """Return `plan 3 of 5 · bf16 1.62× [1.50, 1.75] · lost so far 0.4 %`."""
    race = work.race
    number, every = race.number
    words = [f"plan {max(number, 1)} of {every}"] if not race.is_settled else []
    if race.proof is not None:
        low, high = race.proof.low, race.proof.high
        words.append(f"{race.leader} {race.proof.median:.2f}× [{low:.2f}, {high:.2f}]")
    else:
        words.append(race.duel.rival if race.duel else "as it was")
    lost = race.lost_s / max(race.elapsed_s, 1e-9)
    return " · ".join([*words, f"lost so far {lost:.1%}".replace("%", " %")])

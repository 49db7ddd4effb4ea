"""What was found for this very step earlier: looked up, checked in a short A/B, kept anew."""

from __future__ import annotations

from collections.abc import Generator

from speedkit_jupyter.measure.checks.attention_calls import Seen
from speedkit_jupyter.measure.rounds.sampler import Progress
from speedkit_jupyter.measure.subject.step import Step
from speedkit_jupyter.optimizations.attention.timings import Call
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.tuning import learning, tasks
from speedkit_jupyter.tuning.allowance import Allowance
from speedkit_jupyter.tuning.candidates import Candidate
from speedkit_jupyter.tuning.outcome import Tuning
from speedkit_jupyter.tuning.proof import Proof
from speedkit_jupyter.tuning.stages import BASELINE, Stages
from speedkit_jupyter.tuning.tasks import Task


class Recalled:
    """By what a step is and does, which takes one run of it or two, undone.

    These runs say also what one takes (`allowance`), which optimizers it makes (the `tuning`'s
    facts) and which attention calls it makes; with `fresh` what is known is not asked for.
    """

    def __init__(self, step: Step, tuning: Tuning, allowance: Allowance, fresh: bool) -> None:
        self._step, self._tuning, self._allowance, self._fresh = step, tuning, allowance, fresh
        self._identity: tuple[str, Task] | None = None
        self._calls: dict[Call, Seen] = {}

    def look_up(self) -> None:
        """Makes a learned plan the winner, not yet checked. Raises what the step raises."""
        __tracebackhide__ = True
        if self._identity is not None:
            return
        self._identity = self._identified()
        learned = None if self._fresh else learning.find(*self._identity)
        if learned is not None and learned.plan["values"]:  # where nothing helped, search again
            self._tuning.learned = learned
            self._tuning.winner = Candidate(learned.plan["values"])

    def _identified(self) -> tuple[str, Task]:
        __tracebackhide__ = True
        tuning, took_s = self._tuning, list[float]()
        identity = tasks.identify(
            self._step,
            tuning.hardware,
            tuning.aim,
            tuning.steps,
            took_s,
            self._allowance.budget,
            tuning.kept,
            self._calls,
        )
        self._allowance.is_known_to_take(min(took_s))
        made, others = self._step.made, tuning.facts_of_others
        tuning.facts = tuning.facts.stepped_by(made)
        tuning.facts_of_others = tuple(facts.stepped_by(made) for facts in others)
        return identity

    def taken_calls(self) -> dict[Call, Seen]:
        """Of attention, which are forgotten here: they hold tensors of the step."""
        calls, self._calls = self._calls, {}
        return calls

    def check(self, known: Candidate, stages: Stages) -> Generator[Progress, None, None]:
        """A short A/B of the plan that was learned; it is forgotten where it does not hold."""
        __tracebackhide__ = True
        yield from Proof(stages).confirm(known, "checking the learned plan", parts=False)
        tuning, learned = self._tuning, self._tuning.learned
        if tuning.winner.name == known.name or learned is None:
            return
        if not tuning.unclear:
            learning.forget(learned)
        outcome = "could not be checked" if tuning.unclear else "was dropped"
        reasons = [
            candidate.reason for candidate in tuning.rejected if candidate.name == known.name
        ]
        tuning.notes.append("; ".join([f"The learned plan {known.name} {outcome}", *reasons]))
        tuning.learned, tuning.comparison = None, None
        tuning.winner, tuning.confirmed, tuning.unclear = BASELINE, False, ""

    def keep(self) -> None:
        """Remember what was found, also that nothing helped: rules shall not turn it on then.

        Not so where the search could not tell. A store that can't be written is said, and no more.
        """
        tuning = self._tuning
        # What was not to be tried may help, for all that it knows.
        no_answer = not tuning.helped and (tuning.unclear or tuning.kept)
        if self._identity is None or no_answer:
            return
        winner = tuning.winner
        try:
            learning.keep(*self._identity, tuning.plan, winner.values, winner.name, tuning.ratio)
        except SpeedKitError as error:
            tuning.notes.append(f"the plan was not kept for the next time: {error}")

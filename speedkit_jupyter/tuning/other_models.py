"""What makes another model, on top of the plan that was found: where the user names an accuracy."""

from __future__ import annotations

from collections.abc import Generator

from speedkit_jupyter.measure.rounds.sampler import Progress
from speedkit_jupyter.measure.subject.named_accuracy import NamedAccuracy
from speedkit_jupyter.optimizations import CATALOG
from speedkit_jupyter.optimizations.base.decision import Effect
from speedkit_jupyter.plans.planning import plan
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.tuning.candidates import Candidate, lead, means_something
from speedkit_jupyter.tuning.outcome import Tuning, row_of
from speedkit_jupyter.tuning.proof import Prover
from speedkit_jupyter.tuning.races import Grid

# More are not told apart in the time that a search leaves.
MOST = 6


def choose(prover: Prover, accuracy: NamedAccuracy) -> Generator[Progress, None, None]:
    """Take the fastest that the user's number accepts, where it leads what was found.

    It is not remembered: the number decides anew each time.
    """
    __tracebackhide__ = True
    tuning = prover.tuning
    tried = candidates(tuning) if tuning.objective == "time" else []
    if not tried:
        nothing = "Nothing here changes the results"
        tuning.notes.append(f"{nothing}, so {accuracy.name} had nothing to decide")
        return
    if not prover.allowance.has_time(len(tried) + 1):
        names = ", ".join(candidate.name for candidate in tried)
        tuning.notes.append(f"No time was left for other models: {names}")
        return
    before = tuning.winner
    asked = [before, *tried] if before.values else tried
    try:
        comparison = yield from prover.benchmark(
            "other models", asked, prover.allowance.budget.left_s, Grid(), accuracy
        )
    except StepError as error:  # what was found stays
        tuning.notes.append(f"Other models were not tried: {error}")
        return
    accepted = [p for p in tried if comparison.verdict(row_of(comparison, p)) == "accepted"]
    leads = [(ahead, p) for p in accepted if (ahead := lead(comparison, before, p)) is not None]
    able = [(ahead.median, p) for ahead, p in leads if ahead.low > 1]
    _, best = max(able, key=lambda one: one[0], default=(1.0, before))
    if best is not before:
        tuning.take(best, comparison)
        tuning.parts_found, tuning.learned = [], None
    for other in tried:
        if other is not best:
            why = prover.aim.why_not(comparison, row_of(comparison, other), best.name)
            tuning.refuse(other.name, why)


def candidates(tuning: Tuning) -> list[Candidate]:
    """Return each of the catalog that makes another model here, beside what was found."""
    every = (tuning.facts, *tuning.facts_of_others)
    found: list[Candidate] = []
    for entry in CATALOG:
        if entry.effect is not Effect.CHANGES_MODEL or entry.name in tuning.kept:
            continue
        for value in entry.changes().values():
            candidate = tuning.winner + Candidate({entry.name: value})
            config = candidate.variant().config
            changes = [plan(config, tuning.hardware, facts).changes_model() for facts in every]
            if means_something(candidate) and any(entry.name in change for change in changes):
                found.append(candidate)
    return list({candidate.name: candidate for candidate in found}.values())[:MOST]

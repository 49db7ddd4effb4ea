"""What makes another model, on top of the plan that was found: where the user names an accuracy."""

from __future__ import annotations

from collections.abc import Generator

from speedkit_jupyter.measure.results.comparison import Comparison
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
    """The fastest that the user's number accepts, where it is proven faster than what was found.

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
    able = [candidate for candidate in tried if _is_ahead(comparison, before, candidate)]
    best = before
    if able:
        best = max(able, key=lambda one: _speedup(comparison, one))
        tuning.take(best, comparison)
        tuning.parts_found, tuning.learned = [], None
    for other in tried:
        if other is not best:
            why = prover.aim.why_not(comparison, row_of(comparison, other), best.name)
            tuning.refuse(other.name, why)


def candidates(tuning: Tuning) -> list[Candidate]:
    """Each of the catalog that makes another model here, beside what was found."""
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


def _is_ahead(comparison: Comparison, before: Candidate, candidate: Candidate) -> bool:
    """Whether it is accepted, and proven faster than the baseline and than what was found."""
    ahead = lead(comparison, before, candidate)
    accepted = comparison.verdict(row_of(comparison, candidate)) == "accepted"
    return accepted and ahead is not None and ahead.low > 1


def _speedup(comparison: Comparison, candidate: Candidate) -> float:
    ratio = comparison.ratio(row_of(comparison, candidate))
    return 0.0 if ratio is None else ratio.median

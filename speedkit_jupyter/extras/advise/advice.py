"""Rank opportunities to speed up a step, leave out small gains, and report the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from speedkit_jupyter.extras.profile.profile import MOST_ROWS, PARTS, Part, Profile
from speedkit_jupyter.report.elements import Section, Table, banner
from speedkit_jupyter.report.rendering import Document
from speedkit_jupyter.rounds.comparison import Shown
from speedkit_jupyter.support.source_lines import Spot
from speedkit_jupyter.support.units import ratio, seconds, share

EXACT = "none: the results are the same"
# The largest share of a step that a remedy is expected to remove: some time always remains.
MOST_REMOVED = 0.995
# Comparisons of a few seconds can't prove smaller gains. An opportunity with a smaller `gain.high`
# is left out, unless its rule is in ALWAYS.
LEAST_GAIN = 1.05
HOW = (
    "Expected is a range, not a promise. It is computed from the share of the step that the remedy "
    "concerns, and from the speed-up of that part (Amdahl). Gains on the same part do not add up."
)
NEXT = (
    "`%speedkit advise --try NUMBER` measures an opportunity. Measure code that you write by hand "
    "with `%%speedbench` before and after."
)
TUNE = "The gain of switches (precision, compile, layouts) is measured by %%speedbench --tune."


class Gain(NamedTuple):
    """The expected speed-up of the whole step, old time ÷ new time, from `low` to `high`."""

    low: float
    high: float

    @property
    def saved(self) -> float:
        return 1 - (1 / self.low + 1 / self.high) / 2

    def __str__(self) -> str:
        return f"{ratio(self.low)} to {ratio(self.high)}"


def amdahl(share: float, least: float, most: float = math.inf) -> Gain:
    """Return the step's gain if `share` of its time runs `least` to `most` times as fast.

    See G. M. Amdahl, Validity of the single processor approach, AFIPS 1967.
    """
    share = min(max(share, 0.0), MOST_REMOVED)
    return Gain(1 / (1 - share + share / least), 1 / (1 - share + share / most))


def without(share: float) -> float:
    return amdahl(share, math.inf).low


@dataclass(frozen=True)
class Subject:
    """A step's models, optimizers and loaders. An Advice doesn't keep them alive."""

    models: Sequence[torch.nn.Module] = ()
    optimizers: Sequence[torch.optim.Optimizer] = ()
    loaders: Sequence[DataLoader[Any]] = ()

    @property
    def held(self) -> set[int]:
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return {id(one) for group in groups for one in group["params"]}

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return list({id(one): one for model in self.models for one in model.parameters()}.values())

    @property
    def idle(self) -> list[torch.nn.Parameter]:
        """Return the parameters that require gradients but belong to no optimizer."""
        held = self.held
        return [one for one in self.parameters if one.requires_grad and id(one) not in held]


# A function of a Subject that returns a context manager, in which the remedy is applied.
Remedy = Callable[[Subject], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Opportunity:
    """A reason why a step is slow, with `evidence` and a `remedy`: the code to write instead.

    `gain` is the expected gain of the whole step. `trial` applies the remedy in a measurement; if
    None, the user must write the remedy. Some rules also set the slow lines (`spots`) or `part`.
    """

    title: str
    evidence: str
    gain: Gain
    remedy: str
    risk: str = EXACT
    rule: str = ""
    trial: Remedy | None = field(default=None, repr=False)
    spots: tuple[Spot, ...] = ()
    part: Part | None = None

    def to_dict(self) -> dict[str, Any]:
        words = ("rule", "title", "evidence", "remedy", "risk")
        return {"gain": self.gain._asdict(), **{word: getattr(self, word) for word in words}}


@dataclass(repr=False)
class Advice(Shown):
    """The result of `advise`.

    Attributes:
        profile: The profile of the step.
        opportunities: The changes that may help, the largest expected gain first.
        skipped: The error of each rule that failed, by rule.
        subject: The step's name.
        proven: A sentence about the plan in force or the result of tuning; empty without either.
    """

    REPORT = f"{__name__}:advice_report"

    profile: Profile
    opportunities: list[Opportunity] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    subject: str = ""
    proven: str = ""

    def rows(self) -> list[dict[str, Any]]:
        return [one.to_dict() for one in self.opportunities]

    def to_dict(self) -> dict[str, Any]:
        return {
            "opportunities": self.rows(), "proven": self.proven, "skipped": dict(self.skipped),
            "profile": self.profile.to_dict(), "environment": dict(self.profile.environment),
            "command": self.profile.command,
        }  # fmt: skip


def ranked(found: Iterable[Opportunity], always: frozenset[str]) -> list[Opportunity]:
    """Return the opportunities, the largest gain first; small gains only from rules in `always`.

    An opportunity is also left out if earlier opportunities in `found` cover all its lines.
    """
    known, kept = set[Spot](), list[Opportunity]()
    for one in found:
        is_new = not one.spots or not set(one.spots) <= known
        known |= set(one.spots)
        if is_new and (one.gain.high >= LEAST_GAIN or one.rule in always):
            kept.append(one)
    return sorted(kept, key=lambda one: -one.gain.saved)


def advice_report(advice: Advice) -> Document:
    """Return the report: a table of the first MOST_ROWS opportunities, and notes."""
    profile, every = advice.profile, advice.opportunities
    if not profile.taken:
        return Document("Nothing was measured")
    rows = [
        (
            f"--try {number}" if one.trial else "by hand",
            one.title,
            str(one.gain),
            one.evidence,
            one.remedy + (f" (risk: {one.risk})" if one.risk != EXACT else ""),
        )
        for number, one in enumerate(every[:MOST_ROWS], 1)
    ]
    heads = ("measure", "opportunity", "expected", "because", "write")
    content = [
        Table(heads, rows, wraps=("opportunity", "because"), least_last=24),
        NEXT if every else "",
        advice.proven or TUNE,
        Section("\n".join(_advice_notes(advice)), folded=True),
    ]
    result = "no known reason why it would be slow"
    if every:
        noun = "opportunity" if len(every) == 1 else "opportunities"
        result = f"{len(every)} {noun}, the first {every[0].gain}"
    elif profile.is_interrupted:
        result = "interrupted before reasons were looked for"
    subject = f" of `{advice.subject}`" if advice.subject else ""
    headline = f"{seconds(profile.step_s)} a step{subject}: {result}"
    return Document(f"{banner(profile.load)}{headline}", content, advice.to_dict())


def _advice_notes(advice: Advice) -> Iterator[str]:
    shares = ((part, advice.profile.share(part)) for part in PARTS)
    yield f"The step: {', '.join(f'{part} {share(of)}' for part, of in shares if of >= 0.005)}."
    if (more := len(advice.opportunities) - MOST_ROWS) > 0:
        yield f"{more} more opportunities gain less: they are in the result's rows()."
    if advice.opportunities:
        yield HOW
    if advice.profile.why_no_costs:
        why = advice.profile.why_no_costs
        yield f"Operators were not timed ({why}), so rules about operators may find nothing."
    yield from (f"{rule}: left out ({why})" for rule, why in advice.skipped.items())

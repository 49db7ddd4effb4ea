"""Opportunities to make a step faster, with their expected gain, and their report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from speedkit_jupyter.extras.profile.costs import MOST_ROWS
from speedkit_jupyter.extras.profile.profile import PARTS, Part, Profile
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import Section, Table, banner
from speedkit_jupyter.rounds.presentable import Shown, report_of
from speedkit_jupyter.support.source_lines import Spot
from speedkit_jupyter.support.units import ratio, seconds, share

EXACT = "none: the results are the same"
# The largest share of a step that a remedy may be expected to remove: some Python always remains.
MOST_REMOVED = 0.995
# An opportunity with a smaller gain at best is not worth a line: comparisons of a few seconds can't
# tell it from none.
LEAST_GAIN = 1.05
HOW = (
    "A range is computed from the share of the step that the remedy concerns, and from how many "
    "times as fast that part gets. Opportunities about one part do not add up."
)


class Gain(NamedTuple):
    """The expected speed-up of the whole step, old time ÷ new time, from `low` to `high`."""

    low: float
    high: float

    @property
    def saved(self) -> float:
        """Return the share of the time that is expected to go, 0 to 1."""
        return 1 - (1 / self.low + 1 / self.high) / 2

    def __str__(self) -> str:
        return f"{ratio(self.low)} to {ratio(self.high)}"


def amdahl(share: float, least: float, most: float = math.inf) -> Gain:
    """Return the gain of the step if a part with this share gets `least` to `most` times as fast.

    (G. M. Amdahl: Validity of the single processor approach, AFIPS 1967.)
    """
    share = min(max(share, 0.0), MOST_REMOVED)
    return Gain(1 / (1 - share + share / least), 1 / (1 - share + share / most))


def without(share: float) -> float:
    """Return the speed-up of the step if a part with this share goes."""
    return amdahl(share, math.inf).low


@dataclass(frozen=True)
class Subject:
    """The objects that a remedy changes, given at each trial: an opportunity keeps none alive."""

    models: Sequence[torch.nn.Module] = ()
    optimizers: Sequence[torch.optim.Optimizer] = ()
    loaders: Sequence[DataLoader[Any]] = ()

    @property
    def held(self) -> set[int]:
        """Return the ids of the parameters that optimizers step."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return {id(one) for group in groups for one in group["params"]}

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters of all models, each once."""
        return list({id(one): one for model in self.models for one in model.parameters()}.values())


# Returns a context manager for one block, in which the step runs with the remedy.
Remedy = Callable[[Subject], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Opportunity:
    """A reason why a step is slow, with its `evidence` and the code to write instead, `remedy`.

    `gain` is the expected gain of the whole step. A `trial` can be measured at once, without
    gradients of the parameters that `unread` returns. `spots` are the user's lines of this reason,
    and `part` is the part of the step.
    """

    title: str
    evidence: str
    gain: Gain
    remedy: str
    risk: str = EXACT
    rule: str = ""
    trial: Remedy | None = field(default=None, repr=False)
    unread: Callable[[Subject], list[torch.nn.Parameter]] | None = field(default=None, repr=False)
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
        proven: A sentence about the plan that tuning has proven for this step, or empty.
    """

    REPORTS = __name__

    profile: Profile
    opportunities: list[Opportunity] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    subject: str = ""
    proven: str = ""

    def rows(self) -> list[dict[str, Any]]:
        return [one.to_dict() for one in self.opportunities]

    def to_dict(self) -> dict[str, Any]:
        return {
            "opportunities": self.rows(),
            "proven": self.proven,
            "skipped": dict(self.skipped),
            "profile": self.profile.to_dict(),
            "environment": dict(self.profile.environment),
            "command": self.profile.command,
        }


def ranked(found: Iterable[Opportunity], always: frozenset[str]) -> list[Opportunity]:
    """Return the opportunities that are worth a line, or of the rules `always`, by gain.

    Of several about the same lines only the first is returned.
    """
    known, kept = set[Spot](), list[Opportunity]()
    for one in found:
        is_new = not one.spots or not set(one.spots) <= known
        known |= set(one.spots)
        if is_new and (one.gain.high >= LEAST_GAIN or one.rule in always):
            kept.append(one)
    return sorted(kept, key=lambda one: -one.gain.saved)


@report_of.register
def advice_report(advice: Advice) -> Document:
    """Return the opportunities in tables, the largest expected gain first."""
    profile, every = advice.profile, advice.opportunities
    if not profile.taken:
        return Document("Nothing was measured")
    reasons, writing = [], []
    for number, one in enumerate(every[:MOST_ROWS], 1):
        trial = "`%%speedbench --save NAME` before and after"
        if one.trial:
            trial = f"%speedkit advise --try {number}"
        reasons.append((str(number), one.title, str(one.gain), one.evidence))
        writing.append((str(number), one.remedy, trial, one.risk))
    heads = ("", "opportunity", "expected, whole step", "because")
    because = Table(heads, reasons, heads[:1], heads[1:2], least_last=40)
    heads = ("", "write", "measure it", "risk")
    remedies = Table(heads, writing, heads[:1], heads[1:3], least_last=30)
    shares = ((part, profile.share(part)) for part in PARTS)
    parts = ", ".join(f"{part} {share(of)}" for part, of in shares if of >= 0.005)
    content = [
        because,
        Section(remedies, "Code to write"),
        f"The step: {parts}.",
        "\n".join(_advice_notes(advice)),
        Section(HOW, folded=True),
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
    if (more := len(advice.opportunities) - MOST_ROWS) > 0:
        yield f"{more} more gain less: in the result's rows()."
    if advice.opportunities:
        yield "Expected is the range by the split (Amdahl), not a promise: the comparison measures."
    switches = "The gain of switches (precision, compile, layouts) is measured by"
    yield advice.proven or f"{switches} %%speedbench --tune."
    if advice.profile.why_no_costs:
        why = advice.profile.why_no_costs
        yield f"Times of operators: {why}, so rules about these may be silent."
    yield from (f"{rule}: left out ({why})" for rule, why in advice.skipped.items())

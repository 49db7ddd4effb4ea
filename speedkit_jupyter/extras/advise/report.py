"""The report of advice: opportunities, the largest expected gain first."""

from __future__ import annotations

from collections.abc import Iterator

from speedkit_jupyter.extras.advise.advice import Advice
from speedkit_jupyter.extras.profile.report import MOST
from speedkit_jupyter.extras.profile.split import PARTS
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import Section, Table
from speedkit_jupyter.rounds.presentable import report_of
from speedkit_jupyter.support.units import seconds, share

# The share of a part that advice names.
LEAST_NAMED = 0.005
# What tries a remedy that only the user can write.
BY_HAND = "%%speedbench --save NAME, before and after"
HOW = (
    "A range is computed from the share of the step that the remedy concerns, and from how many "
    "times as fast that part gets. Opportunities about one part do not add up."
)


@report_of.register
def advice_report(advice: Advice) -> Document:
    """Return the opportunities, that with the largest expected gain first."""
    profile, every = advice.profile, advice.opportunities
    if not profile.taken:
        return Document("Nothing was measured")
    reasons, writing = [], []
    for number, one in enumerate(every[:MOST], 1):
        trial = f"%speedkit advise --try {number}" if one.variant or one.trial else BY_HAND
        reasons.append((str(number), one.title, str(one.gain), one.evidence))
        writing.append((str(number), one.remedy, trial, one.risk))
    heads = ("", "opportunity", "expected, whole step", "because")
    because = Table(heads, reasons, heads[:1], heads[1:2], least_last=40)
    heads = ("", "write", "measure it", "risk")
    remedies = Table(heads, writing, heads[:1], heads[1:3], least_last=30)
    shares = {part: profile.share(part) for part in PARTS}
    parts = ", ".join(f"{part} {share(of)}" for part, of in shares.items() if of >= LEAST_NAMED)
    waits = [f"{profile.place(w.line)}: waits {w.times:.3g} times a step" for w in profile.waits()]
    content = [
        because,
        Section(remedies, "What to write"),
        f"The step: {parts}.",
        "\n".join(_advice_notes(advice)),
        Section("\n".join([HOW, *waits]), folded=True),
    ]
    told = "no known reason why it would be slow"
    if every:
        noun = "opportunity" if len(every) == 1 else "opportunities"
        told = f"{len(every)} {noun}, the first {every[0].gain}"
    elif profile.is_interrupted:
        told = "interrupted before reasons were looked for"
    subject = f" of `{advice.subject}`" if advice.subject else ""
    headline = f"{seconds(profile.step_s)} a step{subject}: {told}"
    return Document(headline, content, advice.to_dict())


def _advice_notes(advice: Advice) -> Iterator[str]:
    if (more := len(advice.opportunities) - MOST) > 0:
        yield f"{more} more gain less: in the result's rows()."
    if advice.opportunities:
        yield "Expected is what the split allows (Amdahl), not a promise: the comparison measures."
    yield "What switches bring (precision, compile, layouts) is measured by %%speedbench --tune."
    if advice.profile.why_no_costs:
        why = advice.profile.why_no_costs
        yield f"Times of operators: {why}, so rules about these may be silent."
    yield from (f"{rule}: left out ({why})" for rule, why in advice.skipped.items())

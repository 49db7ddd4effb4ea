"""The summary, the live line and the report of `auto`, with a plot of the steps' times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import cycle
from typing import TYPE_CHECKING

from IPython import get_ipython

from speedkit_jupyter.extras.auto.race import BASELINE
from speedkit_jupyter.extras.auto.raced_loop import RacedLoop
from speedkit_jupyter.plans.naming import name_of
from speedkit_jupyter.report.elements import Picture, Section, Table, banner
from speedkit_jupyter.report.rendering import GOOD, NEUTRAL, Document, as_png, axes_of
from speedkit_jupyter.support import units

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WAITING = "auto is on; no loop was seen yet. Run a cell that trains."
IN_NOTEBOOK = "`%speedkit report` says why, `%speedkit code` takes it home."
NEXT = "`%speedkit auto status` shows the race."
IN_PROGRAM = "The next run begins with it; `tuned(model, optimizer)` is its config."
# A loop has a summary if it took LEAST_S seconds, or LEAST_PROVEN_S with a proven plan.
LEAST_S, LEAST_PROVEN_S = 1.0, 0.1


def report(loop: RacedLoop | None, refused: Iterable[str] = (), busy: str = "") -> Document:
    """Return a loop's report: headline, plot, plans; without a loop, the refusals or WAITING."""
    if loop is None:
        first, *others = [*refused] or [WAITING]
        return Document(first, others)
    headline = summary(loop, busy=busy) if loop.totals.steps else live_line(loop)
    picture = Picture(lambda: as_png(steps_over_time(loop)), "The seconds of each step, by plan.")
    return Document(headline, [Section(picture), Section(_plans(loop), "Plans")])


def _plans(loop: RacedLoop) -> Table:
    race, served, rows = loop.race, Counter(plan for _, plan, _ in loop.log), []
    for name in dict.fromkeys((BASELINE, *race.tried, *race.waiting, *race.reasons)):
        duel, rounds, speedup = race.tried.get(name), "", ""
        if duel is not None and duel.pairs:
            rounds, speedup = f"{len(duel.pairs):,}", f"{units.ratio(duel.median)} {duel.leader}"
        if name == race.leader and race.proof is not None:  # as in the headline
            rounds = rounds or "earlier run"
            speedup = f"{units.ratio(race.proof.median)} {BASELINE}"
        turn = "races again: the machine was busy" if name in race.again else "waits for its turn"
        outcome = race.reasons.get(name, turn if name in race.waiting else "")
        if name == loop.plans.in_force:
            outcome = "in force"
        elif race.duel is not None and name == race.duel.rival:
            outcome = "not decided yet"
        rows.append((name, f"{served[name]:,}", rounds, speedup, outcome))
    return Table(("plan", "steps", "rounds", "speed-up", "what came of it"), rows)


def steps_over_time(loop: RacedLoop) -> Figure:
    """Return a plot of the logged steps: milliseconds by the seconds since the loop began."""
    names = [*dict.fromkeys(name for _, name, _ in loop.log)]
    axes = axes_of(2.4 + 0.2 * len(names), "seconds since the loop began")
    others = cycle(["C0", "C1", "C3", "C4", "C5", "C6", "C8", "C9"])  # green and grey are taken
    for name in names:
        own = [(at_s, 1e3 * seconds) for at_s, one, seconds in loop.log if one == name]
        colour = {loop.race.leader: GOOD, BASELINE: NEUTRAL}.get(name) or next(others)
        axes.plot(*zip(*own, strict=True), ".", label=name, color=colour, markersize=4, alpha=0.7)
    axes.set_ylabel("ms a step", color=NEUTRAL)
    axes.set_yscale("log")
    axes.tick_params(which="both", colors=NEUTRAL)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}")
    axes.figure.legend(loc="outside upper left", labelcolor=NEUTRAL, frameon=False, markerscale=2)
    return axes.figure  # type: ignore[no-any-return]


def summary(loop: RacedLoop, in_notebook: bool = True, busy: str = "") -> str:
    """Return a line that sums up a loop in a cell; it begins with the warning `busy`, if any."""
    totals, race = loop.totals, loop.race
    steps, took_s = sum(totals.steps.values()), sum(totals.seconds.values())
    what = "steps" if loop.trains else "calls"
    begun = f"{banner(busy)}{steps:,} {what} in {units.seconds(took_s)}"
    if race.proof is None:
        tried, every = race.number
        if race.is_settled:
            if not tried and race.reasons:
                name, why = next(iter(race.reasons.items()))
                return f"{begun}: no plan raced, so all is as it was. {name}: {why}."
            plans = f"{begun}: {units.count(tried, 'plan')} tried"
            return f"{plans}, none proven faster, so all is as it was."
        where = f"{tried} of {units.count(every, 'plan')} raced"
        duels = [one for one in race.tried.values() if one and one.leader == BASELINE and one.pairs]
        if duels:
            best = max(duels, key=lambda one: one.median)
            rounds = units.count(len(best.pairs), "round")
            where = f"best so far: {best.rival}, {units.ratio(best.median)} as fast in {rounds}"
        elif race.duel is not None:
            where = f"no round of {race.duel.rival} was finished"
        line = f"{begun}: no plan is proven yet; {where}. The next run goes on."
        return f"{line} {NEXT}" if in_notebook else line
    ratio = race.proof
    under = 1 - totals.seconds.get(BASELINE, 0.0) / took_s
    gain, low, high = (1 + under * (one - 1) for one in (ratio.median, ratio.low, ratio.high))
    plain, times = units.seconds(took_s * gain), f"{gain:.2f}×, {low:.2f} to {high:.2f}"
    earlier = ", as an earlier run proved" * (race.tried.get(race.leader) is None)
    line = f"{begun}, about {plain} without ({times}) by {race.leader}{earlier}."
    if totals.predictions:
        exact = "--eval exact" if in_notebook else 'evaluation="exact" keeps them plain'
        calls = units.count(totals.predictions, "call")
        line += f" {calls} for evaluation ran under it too ({exact})."
    if not in_notebook:
        return f"{line} {IN_PROGRAM}"
    names = getattr(get_ipython(), "user_ns", None)  # magics need a variable that holds the model
    is_named = names is None or any(name_of(names, one, "") for one in loop.plans.live_models)
    return f"{line} {IN_NOTEBOOK if is_named else NEXT}"


def is_short(loop: RacedLoop) -> bool:
    """Return whether a loop of a cell took too little time to be reported."""
    least_s = LEAST_S if loop.race.proof is None else LEAST_PROVEN_S
    return sum(loop.totals.seconds.values()) < least_s


def live_line(loop: RacedLoop) -> str:
    """Return a line such as `plan 3 of 5 · bf16 1.62× [1.50, 1.75] · lost so far 0.4 %`."""
    race, proof = loop.race, loop.race.proof
    number, every = race.number
    words = [f"plan {max(number, 1)} of {every}"] if not race.is_settled else []
    if proof is not None:
        words.append(f"{race.leader} {proof.median:.2f}× [{proof.low:.2f}, {proof.high:.2f}]")
    else:
        words.append(race.duel.rival if race.duel else "as it was")
    lost = 100 * race.lost_s / max(race.elapsed_s, 1e-9)
    return " · ".join([*words, f"lost so far {lost:.1f} %"])

"""The report of `auto`, with a plot of the steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from speedkit_jupyter.extras.auto.live import Work
from speedkit_jupyter.extras.auto.race import BASELINE
from speedkit_jupyter.extras.auto.session import Auto, live_line, summary
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import GOOD, NEUTRAL, Picture, Section, Table, as_png, axes_of
from speedkit_jupyter.support import units

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OFF = "auto is off: `%speedkit auto` switches it on."
WAITING = "auto is on; no loop was seen yet. Run a cell that trains."


def report(auto: Auto | None) -> Document:
    """Return the races of this session: each loop's line, its plans, and their steps over time."""
    if auto is None:
        return Document(OFF)
    if not auto.works:
        return Document(WAITING, list(auto.refused))
    work = auto.latest or auto.works[-1]
    headline = summary(work) or live_line(work)
    return Document(headline, [Section(picture(work)), Section(_plans(work), "Plans")])


def _plans(work: Work) -> Table:
    race = work.race
    rows = []
    for name in (BASELINE, *race.tried, *race.waiting):
        times = [seconds for _, plan, seconds in work.log if plan == name]
        step = units.seconds(sorted(times)[len(times) // 2]) if times else ""
        state = "in force" if name == work.in_force else race.reasons.get(name, "")
        waits = "had no turn" if work.is_applied else "waits for its turn"
        state = state or (waits if name in race.waiting else "")
        is_racing = race.duel is not None and name == race.duel.rival and not work.is_applied
        state = "races" if is_racing else state
        rows.append((name, f"{len(times):,}", step, state))
    return Table(("plan", "steps", "a step", "what came of it"), rows)


def picture(work: Work) -> Picture:
    """Return the plot of `steps_over_time`, with each plan's median step as its caption."""
    names = list(dict.fromkeys(name for _, name, _ in work.log))
    medians = []
    for name in names:
        times = sorted(seconds for _, one, seconds in work.log if one == name)
        medians.append(f"{name} {units.seconds(times[len(times) // 2])}")
    return Picture(lambda: as_png(steps_over_time(work)), f"A step: {', '.join(medians)}.")


def steps_over_time(work: Work) -> Figure:
    """Plot each step as a dot: seconds since the loop began, and milliseconds of the step."""
    axes = axes_of(2.8, "seconds since the loop began")
    for name in dict.fromkeys(name for _, name, _ in work.log):
        own = [(at_s, 1e3 * seconds) for at_s, one, seconds in work.log if one == name]
        colour = {BASELINE: NEUTRAL, work.race.leader: GOOD}.get(name)
        axes.plot(*zip(*own, strict=True), ".", label=name, color=colour, markersize=4, alpha=0.7)
    axes.set_ylabel("ms a step", color=NEUTRAL)
    axes.set_yscale("log")
    axes.tick_params(which="both", colors=NEUTRAL)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}")
    axes.legend(frameon=False, labelcolor=NEUTRAL)
    return axes.figure  # type: ignore[no-any-return]

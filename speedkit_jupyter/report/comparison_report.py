"""Reports about benchmarks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from speedkit_jupyter import machines
from speedkit_jupyter.measure.checks.accuracy import Accuracy
from speedkit_jupyter.measure.results.comparison import Comparison
from speedkit_jupyter.measure.results.record import Record
from speedkit_jupyter.measure.results.statistics import INTERVAL, spread
from speedkit_jupyter.measure.rounds.budget import LONGER
from speedkit_jupyter.report.comparison_columns import (
    CHANGES,
    comparison_table,
    counted,
    in_short,
    reason,
    spoken,
)
from speedkit_jupyter.report.document import Document
from speedkit_jupyter.report.elements import Folded, Picture, Section
from speedkit_jupyter.report.score_words import change, judged
from speedkit_jupyter.report.units import operations, ratio, seconds, size, word
from speedkit_jupyter.support.words import count

# An interval wider than this share of its median to both sides says where it begins, and no more.
LOOSE = 0.5

# So many lines stand under the table; what matters always does.
SHOWN = 2

OTHERS = ("is faster and changes the results", "are faster and change the results")
NAME_IT = "`--accuracy` takes a function of yours that tells"


class Urgent(str):
    """A line that nobody may overlook."""

    __slots__ = ()


def comparison_report(comparison: Comparison) -> Document:
    """Return the table of a benchmark, with what it means in one line."""
    about = [line for record in comparison.records for line in _about(comparison, record)]
    lines = [*_runner_up(comparison), *about, *_legend(comparison)]
    several = sum(comparison.ratio(record) is not None for record in comparison.records) > 1
    picture = [_picture(comparison)] if several else []  # one ratio is seen without
    sections = [Section(comparison_table(comparison)), *picture, *_folded(lines)]
    return Document(_headline(comparison), tuple(sections), comparison.to_dict())


def narrow_comparison_report(comparison: Comparison) -> Document:
    """Return what fits beside controls: a picture, fewer columns, lines about variants."""
    about = [line for record in comparison.records for line in _about(comparison, record)]
    ratios = [comparison.ratio(record) for record in comparison.records]
    picture = [_picture(comparison)] if any(gain and gain.low > 0 for gain in ratios) else []
    sections = [*picture, Section(comparison_table(comparison, is_brief=True)), *_folded(about)]
    return Document(_headline(comparison), tuple(sections), comparison.to_dict(), is_brief=True)


def _picture(comparison: Comparison) -> Section:
    def png() -> bytes:
        from speedkit_jupyter.report import plots

        return plots.as_png(plots.speedups(comparison))

    return Section(Picture(png, "Speed-up of each variant with its interval, as in the table"))


def _headline(comparison: Comparison) -> str:
    environment = comparison.environment
    rounds = count(len(comparison.baseline.times_s), "round")
    where = f"{environment.get('device')}, torch {environment.get('torch')}, {rounds}"
    if environment.get("planned_for"):
        where += f"; planned {machines.as_for(environment['planned_for'])}"
    best = comparison.best
    if len(comparison.records) == 1 and comparison.baseline.times_s:
        median = seconds(spread(comparison.baseline.times_s).median_s)
        return f"{comparison.baseline.name} takes {median} a step ({where})"
    if best is None:
        return f"{_nothing(comparison)} ({where})"
    told = f"; {change(best.score)}" if best.score and best.changes_model else ""
    return f"{best.name} is {describe_verdict(comparison, best)}{told} ({where})"


def _nothing(comparison: Comparison) -> str:
    """What may be fast and was not checked is not recommended: the reason says what to do."""
    unknown = [
        record for record in comparison.records if comparison.verdict(record) == "not checked"
    ]
    nothing = f"Nothing is proven faster than {comparison.baseline.name}"
    others = [r for r in comparison.records if comparison.verdict(r) == "other model"]
    if others and not unknown:
        names = " and ".join(record.name for record in others)
        return f"{nothing} with the same results; {names} {OTHERS[len(others) > 1]}"
    if not unknown:
        return nothing
    names = ", ".join(record.name for record in unknown)
    accuracy = unknown[0].accuracy
    reason = accuracy.reason if accuracy is not None else ""
    return f"{nothing} and right; {names}: not checked: {reason}"


def describe_verdict(comparison: Comparison, record: Record) -> str:
    """Return `1.23× as fast as baseline, INTERVAL 1.20× to 1.26×`; the record must have times.

    Of a loose interval only the end that is proven: its median is a matter of luck.
    """
    gain = comparison.ratio(record)
    assert gain is not None
    if not gain.is_bounded:
        rounds = count(gain.pairs, "round")
        return f"about {ratio(gain.median)} as fast as {comparison.baseline.name} in {rounds}"
    interval = f"{INTERVAL} {ratio(gain.low)} to {ratio(gain.high)}"
    if gain.low > 1 and not gain.is_precise(LOOSE):
        return f"at least {ratio(gain.low)} as fast as {comparison.baseline.name}, {interval}"
    return f"{ratio(gain.median)} as fast as {comparison.baseline.name}, {interval}"


def _folded(lines: Sequence[str]) -> list[Section]:
    """The two lines that matter most; the others folded."""
    first = [line for line in lines if isinstance(line, Urgent)]
    ordered = [*first, *(line for line in lines if line not in first)]
    shown = max(SHOWN, len(first))
    if len(ordered) <= shown + 1:
        return [Section("\n".join(ordered))] if ordered else []
    return [Section("\n".join(ordered[:shown])), Section(Folded("\n".join(ordered[shown:])))]


def _about(comparison: Comparison, record: Record) -> list[str]:
    lines: list[str] = []
    if record.failure and in_short(record) != reason(record):
        lines.append(f"{spoken(comparison, record)}: {reason(record)}")
    if record.same_as_baseline:
        lines.append("changes nothing here, so there is nothing to measure")
    words = [k if v is True else f"{k} {word(v)}" for k, v in record.applied.items()]
    named = [part.partition(":")[0] for part in record.name.split("+")]
    if words and not record.failure and words != named and "+".join(words) != record.name:
        lines.append(", ".join(words))
    if record.is_other_model(comparison.baseline) and not record.failure:
        lines.append(Urgent(_given_up(record)))
    else:
        if record.accuracy is not None:
            lines += _errors(record.accuracy)
        if record.score and not record.failure and record is not comparison.baseline:
            line = judged(record.score)
            lines.append(Urgent(line) if record.is_refused else line)
    if not record.declined:
        lines += [f"{name}: declined: {reason}" for name, reason in record.declines.items()]
    told = {name: f"{name}: {note}" for name, note in record.notes.items()}
    lines += [Urgent(line) if name == "precision" else line for name, line in told.items()]
    lines += _compilations(comparison, record)
    if record.memory is not None and record.memory.reserved_bytes:
        lines.append(f"torch's allocator reserved {size(record.memory.reserved_bytes)}")
    return [type(line)(f"{record.name}: {line}") for line in lines]


def _given_up(record: Record) -> str:
    """What another model computes otherwise, and what decides about it."""
    accuracy, score = record.accuracy, record.score
    decides = f"its loss decides, not its speed: `%speedkit verify --plan {record.name}`"
    if accuracy is None or accuracy.verdict != "other model":
        told = CHANGES if accuracy is None else f"{accuracy.verdict}: {accuracy.reason}"
        return f"{told}; {decides if score is None else judged(score)}"
    off = {"output off": accuracy.output_error, "loss": accuracy.loss_error}
    if accuracy.gradient_cosine is not None:
        off["gradients"] = accuracy.gradient_error
    else:
        decides = f"what it is for decides, not its speed: {NAME_IT}"
    decides = decides if score is None else judged(score)
    known = [f"{name} by {error:.2g}" for name, error in off.items() if error is not None]
    return f"{CHANGES}: {', '.join(known)}; {decides}"


def _errors(accuracy: Accuracy) -> list[str]:
    """The reason of a verdict; of a rounding one the relative errors beside the baseline's own."""
    if accuracy.reason:
        return [Urgent(f"{accuracy.verdict}: {accuracy.reason}")]
    if accuracy.verdict != "rounding" or accuracy.output_error is None:
        return []
    text = (
        f"output off by {accuracy.output_error:.1g} (baseline {accuracy.baseline_output_error:.1g})"
    )
    if accuracy.gradient_cosine is not None:
        text += (
            f", gradients by {accuracy.gradient_error:.1g} (baseline "
            f"{accuracy.baseline_gradient_error:.1g}, cosine {accuracy.gradient_cosine:.5f})"
        )
    if accuracy.explained_output is None or accuracy.explained_gradient is None:
        return [f"{text}, as its dtype rounds"]
    explained = [f"{accuracy.explained_output:.1g}"]
    if accuracy.gradient_cosine is not None:
        explained.append(f"{accuracy.explained_gradient:.1g}")
    return [f"{text}; its dtype's rounding alone brings {' and '.join(explained)}"]


def _compilations(comparison: Comparison, record: Record) -> list[str]:
    """Graphs, breaks and recompilations, and after how many steps all that is paid back."""
    compilations, lines = record.compilations, []
    if compilations.graphs:
        counts = [count(compilations.graphs, "graph"), count(compilations.breaks, "break")]
        text = f"compiled {', '.join([*counts, count(compilations.recompiles, 'recompile')])}"
        steps = comparison.break_even_steps(record)
        if steps is not None:
            text += f"; its {seconds(record.settling_s)} are paid back after {count(steps, 'step')}"
        lines.append(text)
    if compilations.limit_reached:
        lines.append(
            Urgent(
                "fell back to plain PyTorch at torch's recompile limit "
                "(torch.compiler.config.recompile_limit)"
            )
        )
    return lines


def _runner_up(comparison: Comparison) -> list[str]:
    best, runner_up = comparison.best, comparison.runner_up()
    if best is None or runner_up is None or math.isinf(runner_up[1].high):
        return []
    second, lead = runner_up
    told = "" if lead.low > 1 else ", so this run does not tell them apart"
    interval = f"{ratio(lead.low)} to {ratio(lead.high)}"
    return [f"{best.name} is {ratio(lead.median)} ({interval}) as fast as {second.name}{told}."]


def _legend(comparison: Comparison) -> list[str]:
    lines = [
        "Median time of one step, device synchronized; speed-up: median of the ratios within "
        "each round; first call and warm-up apart. Memory: state and the step's peak beyond it. "
        "Model, optimizer and random state are as before."
    ]
    has_limits = any(comparison.share_of_limit(record) for record in comparison.records)
    if comparison.flops is not None and has_limits:
        lines.append(
            f"A step is {operations(comparison.flops)} of matrix products, convolutions and "
            "attention. Of limit: the time they need at this machine's own GEMM rate (or the "
            "state, read once at its copy rate) as a share of the median."
        )
    lines += [quantity.about for quantity in counted(comparison)]
    if comparison.dropout_off:
        lines.append("Dropout was off in the accuracy check: each kernel draws other masks.")
    if comparison.skipped_rounds:
        rounds = count(comparison.skipped_rounds, "round")
        lines.append(
            Urgent(f"{rounds} left out: the GradScaler skipped the optimizer's step in them.")
        )
    urgent = [comparison.busy, comparison.repeats, *comparison.unrestorable]
    lines += [Urgent(f"{_begun(line)}.") for line in urgent if line]
    if comparison.has_too_few_rounds:
        lines.append(Urgent(f"Too few rounds for an interval: {LONGER}."))
    return lines


def _begun(line: str) -> str:
    """As a sentence begins; what can't be put back begins with a name, which keeps its spelling."""
    is_a_name = "put back" in line and not line.startswith("more than ")
    return line if is_a_name else f"{line[:1].upper()}{line[1:]}"

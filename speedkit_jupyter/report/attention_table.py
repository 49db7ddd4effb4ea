"""The attention kernels side by side, as they were measured on the calls of a step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from speedkit_jupyter.measure.results.statistics import INTERVAL
from speedkit_jupyter.optimizations.attention.timings import Call, Measured, Timed
from speedkit_jupyter.optimizations.base.decision import Decision
from speedkit_jupyter.report.elements import Row, Section, Table
from speedkit_jupyter.report.units import ratio, seconds

TITLE = "Attention kernels on the calls of the step"
NOTE = (
    "Seconds of one call, with its backward pass where it trains; over torch's own choice, in "
    "shuffled rounds; error against the math kernel in float64."
)


def evidence(decisions: Iterable[Decision]) -> list[Section]:
    """The tables behind the numbers of a plan; none where nothing was measured."""
    rows = [row for decision in decisions for row in decision.evidence]
    return [Section(attention_table(rows), TITLE), Section(NOTE)] if rows else []


def attention_table(rows: Sequence[Measured]) -> Table:
    """A row for each kernel of each kind of call."""
    columns = ("call", "a step", "kernel", "time", "speed-up", INTERVAL, "error")
    every = [
        _row(row, timed, first=number == 0)
        for row in rows
        for number, timed in enumerate(
            sorted(row.kernels, key=lambda timed: timed.kernel != row.own)
        )
    ]
    return Table(columns, tuple(every), ("a step", "time", "speed-up", INTERVAL, "error"),
                 wraps=("call",))  # fmt: skip


def _row(row: Measured, timed: Timed, first: bool) -> Row:
    is_own = timed.kernel == row.own
    known = not is_own and not math.isinf(timed.high)
    return Row(
        (
            describe(row.call, row.engine) if first else "",
            f"{row.calls:,}×" if first else "",
            f"{timed.kernel} (torch's own choice)" if is_own else timed.kernel,
            seconds(timed.seconds),
            "–" if is_own else ratio(timed.speedup),
            f"{ratio(timed.low)} to {ratio(timed.high)}" if known else "–",
            "–" if timed.error is None else f"{timed.error:.1g}",
        ),
        "good" if not is_own and timed.low > 1 else "bad" if timed.high < 1 else "plain",
    )


def describe(call: Call, engine: str = "") -> str:
    """`8×12×128×64 float32, causal, training`."""
    sizes = {"query": call.query, "key": call.key, "value": call.value}
    if call.query == call.key == call.value:
        text = _sizes(call.query)
    elif call.key == call.value:
        text = f"{_sizes(call.query)} by {_sizes(call.key)}"
    else:
        text = ", ".join(f"{name} {_sizes(size)}" for name, size in sizes.items())
    options = [
        "causal" if call.is_causal else "",
        f"mask {call.mask}" if call.mask else "",
        f"dropout {call.dropout:g}" if call.dropout else "",
        f"scale {call.scale:.3g}" if call.scale is not None else "",
        "grouped heads" if call.enable_gqa else "",
        "training" if call.trains else "inference",
        f"products by {engine}" if engine else "",
    ]
    return ", ".join([f"{text} {call.dtype}", *filter(None, options)])


def _sizes(size: Sequence[int]) -> str:
    return "×".join(map(str, size))

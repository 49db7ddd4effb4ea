"""The verdict on a variant: one number, which is how far its worst tensor is beyond its limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from speedkit_jupyter.measure.checks.accuracy import Accuracy
from speedkit_jupyter.measure.checks.deviations import (
    LIMITS,
    UNDETERMINED,
    Deviation,
    excess,
    total,
)
from speedkit_jupyter.measure.checks.observer import Key, Look, Row, Run
from speedkit_jupyter.measure.checks.rounding import lowest, unit

# What is beyond its limit by less may be the net or the plan: it is not accused, and can't win.
DOUBT = 2.0
# A float32 output that is off float64 by more is no rounding: some code asks for its dtype, or the
# step computes something else each time. float64 is no reference then.
RANDOM = 0.02
# Of a later look, for which there is no control, the limits are those of the one before it that has
# the same tensors, so many times.
LIKE = 3.0
# As exact as the baseline: by twice its own error, and by so much.
SAME = 1e-6
# How many integers may differ: twice those of the control and three times their scatter, and three
# times the share by which rounding moves the outputs. After more optimizer steps than are followed
# one in a hundred may.
SCATTER, FREE = 3.0, 1e-2
NOTHING_TO_COMPARE = (
    "no model was called, there was no backward pass and no result to compare: end the step with "
    "its result, or name it with --check"
)
BY_CHANCE = "rounding alone decides how many results there are"
MODES = (".training", ".requires_grad")
RESULTS = ("output", "result")
DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}

Place = tuple[Key, str]


@dataclass
class Judge:
    """What variants are judged by: the trace of the step in float64, then of the baseline itself.

    `own` are the baseline's rows that were compared with float64, `controls` the runs with each
    precision's rounding, `lowered` is the precision that the step lowers itself to. `unlike` are
    results that the baseline gives otherwise each time. `void` says why nothing can be judged.
    `drawn` names the operations that drew random numbers, and is None before the first run.
    """

    trace: dict[Key, Look] = field(default_factory=dict)
    baseline: Run = field(default_factory=Run)
    own: Run = field(default_factory=Run)
    controls: dict[str, list[Run]] = field(default_factory=dict)
    lowered: str = "fp32"
    unlike: set[Place] = field(default_factory=set)
    void: str = ""
    drawn: set[str] | None = None

    def follows(self) -> bool:
        """Return whether float64 computes the same as the baseline, but for what that rounds."""
        seen = {key for key, _ in self.baseline.rows}
        missing = [key for key, look in self.trace.items() if look.values and key not in seen]
        if missing or not all(row.fits for row in self.own.rows.values()):
            return False
        rows = [row for row in self.own.rows.values() if row.kind == "output"]
        most = max((row.error.distance for row in rows if row.error), default=0.0)
        return self.lowered != "fp32" or most <= RANDOM

    def note_unlike(self, again: Run) -> None:
        """Note what another run of the baseline gives otherwise by itself."""
        for place, row in again.rows.items():
            known = self.own.rows.get(place)
            differs = self._excess(place, row, self.lowered)[0] > 1
            if differs or (row.count and not (known and known.count)):
                self.unlike.add(place)
            if differs and not (row.kind in RESULTS and place[1].startswith("result")):
                what = _called(row.kind, place[1])
                self.void = f"the step computes something else each time it runs ({what})"

    def judged_in(self, precision: str) -> str:
        """Return the lower one of a variant's precision and the step's own."""
        return lowest(precision, self.lowered)

    def verdict(
        self, run: Run, precision: str, evidence: Iterable[Callable[[], object]] = ()
    ) -> Accuracy:
        """Return exact as the baseline, rounding as its dtype brings, wrong, or not checked.

        Each call of `evidence` adds to what is known, and is made only before an accusation.
        """
        precision = self.judged_in(precision)
        if not self.void and (fault := self._broken(run, precision)):
            return fault
        times, why = self._suspicion(run, precision)
        for gather in evidence:
            if self.void or times <= 1:
                break
            gather()
            times, why = self._suspicion(run, precision)
        if self.void:
            return Accuracy("not checked", self.void)
        numbers = self._numbers(run, precision)
        if times > DOUBT:
            return Accuracy("wrong", why, **numbers)
        if why := why if times > 1 else self._lack(run, precision):
            return Accuracy("not checked", why, **numbers)
        same = all(
            numbers[f"{kind}_error"] is not None
            and numbers[f"{kind}_error"] <= 2 * (numbers[f"baseline_{kind}_error"] or 0.0) + SAME
            for kind in ("output", "gradient")
        )
        return Accuracy("exact" if same else "rounding", **numbers)

    def distance(self, run: Run, precision: str) -> Accuracy:
        """Return how far off another model is, which is any distance; wrong is what is broken."""
        if self.void:
            return Accuracy("not checked", self.void)
        if fault := self._broken(run, self.judged_in(precision), other=True):
            return fault
        losses = []
        for (_, name), row in run.rows.items():
            distance = 0.0 if row.error is None else row.error.distance
            if row.kind == "parameter" and abs(distance - 1.0) < SAME:
                return Accuracy("wrong", f"{name} is not trained")
            losses += [distance] if name == "loss" and row.error else []
        numbers = self._numbers(run, precision)
        return Accuracy("other model", **numbers, loss_error=max(losses, default=None))

    def _suspicion(self, run: Run, precision: str) -> tuple[float, str]:
        """Return how many times its limit the worst tensor is off, and that in words."""
        worst = (0.0, "")
        for place, row in run.rows.items():
            times, words = self._excess(place, row, precision)
            if times > worst[0] and place not in self.unlike:
                worst = times, f"{_where(place, run)}{_called(row.kind, place[1])} {words}"
        if 1 < worst[0] <= DOUBT:
            return worst[0], f"{worst[1]}, which may be the net or the plan"
        if worst[0] <= 1 and (other := self._other_result(run, precision)):
            return DOUBT, f"other result: {other}"
        return worst

    def _excess(self, place: Place, row: Row, precision: str) -> tuple[float, str]:
        kind = row.kind if place[1] or row.kind != "gradient" else "gradients"
        if row.error is None or kind not in LIMITS or place[0] not in self.trace:
            return 0.0, ""
        return excess(
            row.error, row.size, self._control(place, row.kind, precision), kind, precision
        )

    def _explaining(self, place: Place, kind: str, precision: str) -> list[tuple[Row, float]]:
        """Return what rounding did at this moment, or at the last one that has it: how many times
        that explains a row.
        """
        found = []
        for run in (*self.controls.get(precision, ()), self.own):
            row, times = run.rows.get(place), 1.0
            if row is None:
                row, times = run.latest.get((kind, place[1])), LIKE
            found += [] if row is None else [(row, times)]
        return found

    def _control(self, place: Place, kind: str, precision: str) -> Deviation | None:
        """Return how far rounding moves a tensor."""
        known = [
            [times * value for value in row.error]
            for row, times in self._explaining(place, kind, precision)
            if row.fits and row.error is not None
        ]
        return Deviation(*map(max, zip(*known, strict=True))) if known else None

    # What is wrong whatever it computes.

    def _broken(self, run: Run, precision: str, other: bool = False) -> Accuracy | None:
        """`other` is whether it is another model, whose weights may have other shapes."""
        calls = min(len(run.ends), len(self.baseline.ends))
        if run.ends[:calls] != self.baseline.ends[:calls]:
            mine, theirs = run.ends[calls - 1], self.baseline.ends[calls - 1]
            return Accuracy("wrong", f"it makes {mine} optimizer steps instead of {theirs}")
        gone = self.baseline.rows.keys() - run.rows
        unfit = {one: self.baseline.rows[one] for one in gone if one[0][0] < len(run.ends)}
        unfit |= {one: row for one, row in run.rows.items() if not row.fits}
        for place, row in unfit.items() if not run.diverged else ():
            if other and row.kind not in (*RESULTS, "gradient"):
                continue
            for control in self.controls.get(precision, ()):
                if control.diverged or not all(one.fits for one in control.rows.values()):
                    return Accuracy("not checked", BY_CHANCE)
            what = f"another number or shape of {row.kind}s than the baseline's"
            return Accuracy("wrong", f"{_where(place, self.baseline)}{what}")
        for place, row in run.rows.items():
            own, name, where = self.baseline.rows.get(place, row), place[1], _where(place, run)
            is_result = row.kind in RESULTS and not other
            if not row.is_finite and own.is_finite:
                return Accuracy("wrong", f"{where}{row.kind}s are not finite")
            if is_result and row.dtype not in {"", own.dtype, DTYPES.get(precision)}:
                return Accuracy("wrong", f"{where}{name} is {row.dtype}, not {own.dtype}")
            if row.count and name.endswith(MODES) and not (other and name.endswith(MODES[1])):
                return Accuracy("wrong", f"{name} is left otherwise than by the baseline")
        return None

    # Integers and words.

    def _other_result(self, run: Run, precision: str) -> str:
        """Return what differs in integers or text, beyond what rounding explains."""
        share = SCATTER * self._numbers(run, precision)["explained_output"]
        for place, row in run.rows.items():
            if row.count and row.kind != "given" and place not in self.unlike:
                known = [one for one, _ in self._explaining(place, row.kind, precision)]
                if what := _beyond(row, known, share):
                    return f"{_where(place, run)}{_called(row.kind, place[1])} {what}"
        return ""

    def _lack(self, run: Run, precision: str) -> str:
        """Return why nothing that was compared could have failed; empty where something could."""
        compared = [
            self._control(place, row.kind, precision)
            for place, row in run.rows.items()
            if place[1] and row.kind in ("output", "gradient") and row.error and row.size
        ]
        if any(control is None or control.distance < UNDETERMINED for control in compared):
            return ""
        if compared:
            return f"rounding to {precision} alone moves all that was compared by its own size"
        names = ", ".join(dict.fromkeys(run.unknown))
        return f"it gives nothing that can be compared: {names}" if names else NOTHING_TO_COMPARE

    # Numbers of a verdict.

    def _numbers(self, run: Run, precision: str) -> dict[str, Any]:
        explaining = [*self.controls.get(precision, ()), self.own]
        numbers: dict[str, Any] = {}
        for kind in ("output", "gradient"):
            mine, *others = (_distance(each, kind) for each in (run, *explaining))
            numbers[f"{kind}_error"] = mine
            numbers[f"baseline_{kind}_error"] = others[-1] if self.own.rows else 0.0
            numbers[f"explained_{kind}"] = max([2 * unit(precision), *(d or 0.0 for d in others)])
        return numbers


def _beyond(row: Row, known: Sequence[Row], share: float) -> str:
    """Return how integers or text differ; empty where the known rows or a share explain it."""
    counts, is_free = max((each.count for each in known), default=0), row.kind == "result"
    if not row.size:
        return "" if counts or is_free else "is another text"
    share += FREE if is_free else 0.0
    if row.size == 1:  # a count of hits, say
        limit = 2 * max((each.most for each in known), default=0.0) + share * row.largest
        is_beyond = math.ceil(row.most) > limit
        return f"is off by {row.most:g}, beyond the {limit:.2g} of rounding" if is_beyond else ""
    limit = 2 * counts + SCATTER * math.sqrt(counts) + share * row.size
    what = f"differs in {row.count} of {row.size} integers, beyond the {int(limit)} of rounding"
    return what if row.count > limit else ""


def _distance(run: Run, kind: str) -> float | None:
    whole = total([row.sums for row in run.rows.values() if row.kind == kind])
    distance = whole.deviation().distance
    return distance if math.isfinite(distance) else None


def _where(place: Place, run: Run) -> str:
    """Return `in step 2 after 1 optimizer step: `, or nothing for the first moments of a run."""
    call, steps = place[0][:2]
    words = [f"in step {call + 1}"] if call else []
    if count := steps - sum(run.ends[call - 1 : call]):
        words.append(f"after {count} optimizer step{'s' * (count > 1)}")
    return f"{' '.join(words)}: " if words else ""


def _called(kind: str, name: str) -> str:
    if kind == "gradient":
        return f"gradient of {name}" if name else "gradients"
    return name if kind in RESULTS else f"{'parameter' if kind == 'moved' else kind} {name}"

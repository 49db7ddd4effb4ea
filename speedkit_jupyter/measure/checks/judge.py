"""The verdict on a variant: one number, which is how far its worst tensor is beyond its limit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from speedkit_jupyter.measure.checks.accuracy import Accuracy
from speedkit_jupyter.measure.checks.deviations import UNDETERMINED, Deviation, Sums, excess
from speedkit_jupyter.measure.checks.observer import Key, Look, Row, Run
from speedkit_jupyter.measure.checks.reference import parameters_of
from speedkit_jupyter.measure.checks.rounding import lowest, noted_autocast, of_parameters, unit
from speedkit_jupyter.measure.checks.trials import Trials
from speedkit_jupyter.measure.checks.values import is_plain
from speedkit_jupyter.measure.rounds import confinement
from speedkit_jupyter.measure.rounds.runner import Runner

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
# How many integers may differ: twice those of the control and three times their scatter, and this
# many times the share by which rounding moves the outputs. After more optimizer steps than are
# followed one in a hundred may.
SCATTER, OF_OUTPUT, FREE = 3.0, 3.0, 1e-2
NOTHING_TO_COMPARE = (
    "no model was called, there was no backward pass and no result to compare: end the step with "
    "its result, or name it with --check"
)
BY_CHANCE = "rounding alone decides how many results there are"
MODES = (".training", ".requires_grad")


@dataclass
class Judge:
    """What variants are judged by: the trace of the step in float64, then of the baseline itself.

    `own` are the baseline's rows that were compared with float64, `controls` the runs with each
    precision's rounding, `lowered` is the precision that the step lowers itself to. `unlike` are
    results that the baseline gives otherwise each time. `void` says why nothing can be judged.
    """

    trials: Trials
    first: Runner
    trace: dict[Key, Look] = field(default_factory=dict)
    baseline: Run = field(default_factory=Run)
    own: Run = field(default_factory=Run)
    controls: dict[str, list[Run]] = field(default_factory=dict)
    lowered: str = "fp32"
    unlike: set[tuple[Key, str]] = field(default_factory=set)
    void: str = ""

    def prepare(self) -> None:
        """Run the step in float64 and the baseline."""
        __tracebackhide__ = True
        models, trials = self.first.step.models, self.trials
        held = parameters_of([*models, *self.first.step.optimizers])
        with confinement.calls_noted(models) as calls:
            # An error inside its forward pass breaks a sharded model.
            if all(map(is_plain, held)):
                trials.reference(self.first, self.trace)
        if calls.in_pythons:  # float64 would reach the model there, and not its input
            self.trace.clear()
        covered = set(self.trace)
        with noted_autocast() as entered, confinement.calls_noted(models) as calls:
            self.baseline = trials.run(self.first, self.trace, extends=True)
        self.lowered = lowest(*entered, *of_parameters(held))
        if calls.only_elsewhere:
            self.void = confinement.NOT_REACHED
            return
        for (key, name), row in self.baseline.rows.items():
            if key in covered:
                self.own.add(key, name, row)
        if not self._follows():
            self.trace, self.own = {}, Run()
            self.baseline = trials.run(self.first, self.trace, extends=True)
        if not self.own.rows:  # nothing else has shown that the step computes the same each time
            self.note_unlike()
        if not all(row.is_finite for row in self.baseline.rows.values()):
            self.void = "the step itself gives numbers that are not finite"

    def _follows(self) -> bool:
        """Return whether float64 computes the same as the baseline, but for what that rounds."""
        seen = {key for key, _ in self.baseline.rows}
        missing = [key for key, look in self.trace.items() if look.values and key not in seen]
        if missing or not all(row.fits for row in self.own.rows.values()):
            return False
        rows = [row for row in self.own.rows.values() if row.kind == "output" and row.error]
        most = max((row.error.distance for row in rows if row.error), default=0.0)
        return self.lowered != "fp32" or most <= RANDOM

    def add_control(self, precision: str, scale: float) -> None:
        """Run one more control of this precision: one rounds at random, one to nearest."""
        runs = self.controls.setdefault(precision, [])
        wide = bool(self.own.rows) and self.lowered != "fp32"
        if len(runs) < 2:
            given = (precision, bool(runs), scale, wide)
            run = self.trials.control(self.first, self.trace, *given)
            runs += [] if run is None else [run]

    def note_unlike(self) -> None:
        """Run the baseline once more, and note what it gives otherwise by itself."""
        run = self.trials.run(self.first, self.trace)
        for (key, name), row in run.rows.items():
            if row.count and not self._known((key, name), self.own):
                self.unlike.add((key, name))
            if self._excess(key, name, row, self.lowered)[0] > 1:
                self.unlike.add((key, name))
                if row.kind != "output" or not name.startswith("result"):
                    what = _called(row.kind, name)
                    self.void = f"the step computes something else each time it runs ({what})"

    def _known(self, place: tuple[Key, str], run: Run) -> bool:
        return place in run.rows and bool(run.rows[place].count)

    def judged_in(self, precision: str) -> str:
        """The lower one of a variant's and the step's own."""
        return lowest(precision, self.lowered)

    def verdict(self, run: Run, precision: str, evidence: Iterable[object] = ()) -> Accuracy:
        """Return exact as the baseline, rounding as its dtype brings, wrong, or not checked.

        Each turn of `evidence` adds to what is known; it is asked only before an accusation.
        """
        precision = self.judged_in(precision)
        if not self.void and (fault := self._broken(run, precision)):
            return fault
        (times, why), other = self._worst(run, precision), self._other_result(run, precision)
        more = iter(evidence)
        while (times > 1 or other) and not self.void and next(more, self) is not self:
            (times, why), other = self._worst(run, precision), self._other_result(run, precision)
        if self.void:
            return Accuracy("not checked", self.void)
        numbers = self._numbers(run, precision)
        if times > DOUBT:
            return Accuracy("wrong", why, **numbers)
        doubt = f"{why}, which may be the net or the plan" if times > 1 else ""
        doubt = doubt or (f"other result: {other}" if other else self._lack(run, precision))
        if doubt:
            return Accuracy("not checked", doubt, **numbers)
        pairs = [
            (numbers[f"{kind}_error"], numbers[f"baseline_{kind}_error"])
            for kind in ("output", "gradient")
        ]
        same = all(mine is not None and mine <= 2 * (own or 0.0) + SAME for mine, own in pairs)
        return Accuracy("exact" if same else "rounding", **numbers)

    def distance(self, run: Run, precision: str) -> Accuracy:
        """Return how far off another model is, which is any distance; wrong is what is broken."""
        if self.void:
            return Accuracy("not checked", self.void)
        if fault := self._broken(run, self.judged_in(precision), other=True):
            return fault
        known = [
            (name, row) for (_, name), row in run.rows.items() if row.error and not row.is_free
        ]
        for name, row in known:
            if row.kind == "parameter" and row.error and abs(row.error.distance - 1.0) < SAME:
                return Accuracy("wrong", f"{name} is not trained")
        losses = [row.error.distance for name, row in known if row.error and name == "loss"]
        numbers = self._numbers(run, precision)
        return Accuracy("other model", **numbers, loss_error=max(losses, default=None))

    def _worst(self, run: Run, precision: str) -> tuple[float, str]:
        """Return how many times its limit the worst tensor is off, and that in words."""
        worst = (0.0, "")
        for (key, name), row in run.rows.items():
            times, words = self._excess(key, name, row, precision)
            if times > worst[0] and (key, name) not in self.unlike:
                worst = times, f"{_where(row)}{_called(row.kind, name)} {words}"
        return worst

    def _excess(self, key: Key, name: str, row: Row, precision: str) -> tuple[float, str]:
        if row.error is None or row.is_free or key not in self.trace:
            return 0.0, ""
        kind = row.kind if name or row.kind != "gradient" else "gradients"
        return excess(row.error, self._control(key, name, row.kind, precision), kind, precision)

    def _control(self, key: Key, name: str, kind: str, precision: str) -> Deviation | None:
        """How far rounding moves a tensor: at this moment, or at the last one that has it."""
        known = []
        for run in self._explaining(precision):
            row, times = run.rows.get((key, name)), 1.0
            if row is None:
                row, times = run.latest.get((kind, name)), LIKE
            if row is not None and row.fits and not row.is_free and row.error is not None:
                known.append(row.error.times(times))
        if not known:
            return None
        values = [(error.distance, error.scale, error.bias) for error in known]
        return Deviation(known[0].size, *map(max, zip(*values, strict=True)))

    def _explaining(self, precision: str) -> list[Run]:
        return [*self.controls.get(precision, ()), self.own]

    # What is wrong whatever it computes.

    def _broken(self, run: Run, precision: str, other: bool = False) -> Accuracy | None:
        """`other` is whether it is another model, whose weights may have other shapes."""
        calls = min(len(run.ends), len(self.baseline.ends))
        if run.ends[:calls] != self.baseline.ends[:calls]:
            mine, theirs = run.ends[calls - 1], self.baseline.ends[calls - 1]
            return Accuracy("wrong", f"it makes {mine} optimizer steps instead of {theirs}")
        gone = self.baseline.rows.keys() - run.rows
        unfit = [self.baseline.rows[place] for place in gone if place[0][0] < len(run.ends)]
        unfit += [row for row in run.rows.values() if not row.fits]
        if other:
            unfit = [row for row in unfit if row.kind in ("output", "gradient")]
        if unfit and not run.diverged:
            for control in self.controls.get(precision, ()):
                if control.diverged or not all(row.fits for row in control.rows.values()):
                    return Accuracy("not checked", BY_CHANCE)
            what = f"another number or shape of {unfit[0].kind}s than the baseline's"
            return Accuracy("wrong", f"{_where(unfit[0])}{what}")
        dtypes = {"", {"bf16": "torch.bfloat16", "fp16": "torch.float16"}.get(precision)}
        for place, row in run.rows.items():
            own, name = self.baseline.rows.get(place, row), place[1]
            if not row.is_finite and own.is_finite:
                return Accuracy("wrong", f"{_where(row)}{row.kind}s are not finite")
            if row.kind == "output" and not other and row.dtype not in {own.dtype, *dtypes}:
                return Accuracy("wrong", f"{_where(row)}{name} is {row.dtype}, not {own.dtype}")
            if row.count and name.endswith(MODES) and not (other and name.endswith(MODES[1])):
                return Accuracy("wrong", f"{name} is left otherwise than by the baseline")
        return None

    # Integers and words.

    def _other_result(self, run: Run, precision: str) -> str:
        """What differs in integers or text, beyond what rounding explains."""
        moved = self._numbers(run, precision)["explained_output"]
        for place, row in run.rows.items():
            if not row.count or row.kind == "given" or place in self.unlike:
                continue
            runs, name = self._explaining(precision), (row.kind, place[1])
            rows = [each.rows.get(place) or each.latest.get(name) for each in runs]
            known = [each for each in rows if each is not None]
            if what := _beyond(row, known, OF_OUTPUT * moved + (FREE if row.is_free else 0.0)):
                return f"{_where(row)}{_called(row.kind, place[1])} {what}"
        return ""

    def _lack(self, run: Run, precision: str) -> str:
        """Why nothing of all that was compared could have failed; empty where something could."""
        compared = [
            self._control(key, name, row.kind, precision)
            for (key, name), row in run.rows.items()
            if name and row.kind in ("output", "gradient") and row.error and row.size
            if not row.is_free
        ]
        if any(control is None or control.distance < UNDETERMINED for control in compared):
            return ""
        if compared:
            return f"rounding to {precision} alone moves all that was compared by its own size"
        names = ", ".join(dict.fromkeys(run.unknown))
        return f"it gives nothing that can be compared: {names}" if names else NOTHING_TO_COMPARE

    # Numbers of a verdict.

    def _numbers(self, run: Run, precision: str) -> dict[str, Any]:
        explaining = self._explaining(precision)
        numbers: dict[str, Any] = {}
        for kind in ("output", "gradient"):
            mine, *others = (_distance(each, kind) for each in (run, *explaining))
            numbers[f"{kind}_error"] = mine
            numbers[f"baseline_{kind}_error"] = others[-1] if self.own.rows else 0.0
            numbers[f"explained_{kind}"] = max([2 * unit(precision), *(d or 0.0 for d in others)])
        whole = _whole(run, "gradient")
        norm = math.sqrt(max(whole.off + 2 * whole.product + whole.square, 0.0) * whole.square)
        numbers["gradient_cosine"] = (whole.product + whole.square) / norm if norm else None
        return numbers


def _beyond(row: Row, known: Sequence[Row], share: float) -> str:
    """Return how integers or text differ; empty where the known rows or a share explain it."""
    counts = max((each.count for each in known), default=0)
    if row.is_text:
        return "" if counts or row.is_free else "is another text"
    if row.size == 1:  # a count of hits, say
        limit = 2 * max((each.most for each in known), default=0.0) + share * row.largest
        is_beyond = math.ceil(row.most) > limit
        return f"is off by {row.most:g}, beyond the {limit:.2g} of rounding" if is_beyond else ""
    limit = 2 * counts + SCATTER * math.sqrt(counts) + share * row.size
    what = f"differs in {row.count} of {row.size} integers, beyond the {int(limit)} of rounding"
    return what if row.count > limit else ""


def _whole(run: Run, kind: str) -> Sums:
    rows = [row for row in run.rows.values() if row.kind == kind and not row.is_free]
    return sum((row.sums for row in rows), Sums(0))


def _distance(run: Run, kind: str) -> float | None:
    distance = _whole(run, kind).deviation().distance
    return distance if math.isfinite(distance) else None


def _where(row: Row) -> str:
    return f"{row.place}: " if row.place else ""


def _called(kind: str, name: str) -> str:
    if kind == "gradient":
        return f"gradient of {name}" if name else "gradients"
    return name if kind == "output" else f"{'parameter' if kind == 'moved' else kind} {name}"

"""Judge whether a variant computes the same results as the baseline, up to rounding.

Each tensor's deviation has a limit: a multiple of a control run's deviation, plus a constant. A
control run is the same step, rounded to the variant's precision. In 30 networks (MLPs, CNNs,
recurrent networks, transformers), in training and evaluation, autocast deviated 0.5 to 1.5 times
as much as its control run in every output, and up to 6 times as much in gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal

from speedkit_jupyter.right import deviations
from speedkit_jupyter.right.deviations import Deviation
from speedkit_jupyter.right.reference import lowest, unit
from speedkit_jupyter.right.trace import Key, Look, ObservedDifference, ObservedRun

# If a tensor exceeds its limit by less than this factor, the cause may be the network or the plan.
# Then the variant is not called wrong, but can't win.
DOUBT = 2.0
# The limit of each kind of tensor is a multiple of the control run's deviation, plus a fixed error,
# plus a number of roundings. Gradients changed by 2e-2 in fp16 where rounding switched a ReLU or a
# maximum. Batch statistics of 8 samples changed by 4e-2. "moved" parameters change outside of
# compared optimizer steps, where rounding can reverse Adam's first steps.
LIMITS = {
    "output": (3.0, 0.0, 2.0),
    "gradient": (8.0, 2e-2, 16.0),
    "gradients": (4.0, 1e-2, 4.0),  # all gradients together
    "parameter": (4.0, 1e-2, 2.0),
    "moved": (4.0, 0.25, 2.0),
    "buffer": (8.0, 5e-2, 2.0),
}
# Factor for roundings in float32: kernels sum in another order, and each term may add a rounding.
# In 30 networks, outputs were off by at most 42 roundings. In another small CNN, it was 120.
TERMS = 512.0
# A variant is as exact as the baseline with at most twice the baseline's error, plus this.
AS_EXACT = 1e-6
# Factor for chance. The limit on differing integers is twice the control's count, plus SCATTER ×
# its square root, plus SCATTER × the relative output error of rounding × the number of integers.
SCATTER = 3.0
COMPARED, RESULTS = ("output", "gradient"), ("output", "result")
DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}

Place = tuple[Key, str]


@dataclass(frozen=True)
class Accuracy:
    """The verdict on whether a variant computes the same, and the variant's errors.

    Errors are relative norms against the reference, with the baseline's errors for comparison.
    `explained_output` is the largest output error of control runs, the baseline and two roundings.
    Only a variant that changes the model has a `loss_error`.
    """

    verdict: Literal["exact", "rounding", "other model", "wrong", "not checked"]
    reason: str = ""
    output_error: float | None = None
    gradient_error: float | None = None
    baseline_output_error: float | None = None
    baseline_gradient_error: float | None = None
    explained_output: float | None = None
    loss_error: float | None = None


@dataclass
class StepJudge:
    """Judge variants by a trace: the recorded values of the step in float64, or of the baseline.

    `own` has the baseline's differences from float64. `lowered` is the lowest precision of the
    step's autocast and parameters. `unlike` has the places of values that differ between runs of
    the baseline. `void` is the reason why nothing can be judged. `drawn` names the operations that
    drew random numbers; it is None before the first run.
    """

    trace: dict[Key, Look] = field(default_factory=dict)
    baseline: ObservedRun = field(default_factory=ObservedRun)
    own: ObservedRun = field(default_factory=ObservedRun)
    controls: dict[str, list[ObservedRun]] = field(default_factory=dict)
    lowered: str = "fp32"
    unlike: set[Place] = field(default_factory=set)
    void: str = ""
    drawn: Set[str] | None = None

    def begin(
        self, trace: dict[Key, Look], baseline: ObservedRun, covered: Set[Key], lowered: str
    ) -> None:
        """Set the trace, baseline and `lowered`; `own` gets the rows with keys in `covered`."""
        self.trace, self.baseline, self.lowered = trace, baseline, lowered
        rows = baseline.rows.items()
        self.own = ObservedRun({place: row for place, row in rows if place[0] in covered})

    def follows(self) -> bool:
        """Return whether float64 can be the reference: same shapes, fp32 outputs within 2 %."""
        seen = {key for key, _ in self.baseline.rows}
        missing = [key for key, look in self.trace.items() if look.values and key not in seen]
        if missing or not all(row.fits for row in self.own.rows.values()):
            return False
        outputs = [row.error for row in self.own.rows.values() if row.kind == "output"]
        most = max((error.distance for error in outputs if error), default=0.0)
        # A larger difference between float32 and float64 is not rounding: code depends on dtype,
        # or the step is not deterministic. Then float64 can't be the reference.
        return self.lowered != "fp32" or most <= 0.02

    def note_unlike(self, again: ObservedRun) -> None:
        """Note values that differ in another baseline run. A float outside results sets `void`."""
        for place, row in again.rows.items():
            known = self.own.rows.get(place)
            differs = self._excess(place, row, self.lowered)[0] > 1
            if differs or (row.count and not (known and known.count)):
                self.unlike.add(place)
            is_result = row.kind in RESULTS and place[1].startswith("result")
            if differs and row.error and not is_result:
                name = _called(row.kind, place[1])
                self.void = f"the step computes something else each time it runs ({name})"

    def judged_in(self, precision: str) -> str:
        return lowest(precision, self.lowered)

    def runs_before_verdict(self, run: ObservedRun, precision: str) -> int:
        """Return the number of runs to add (controls and one baseline run) before judging "wrong".

        Return 2 if the run is broken, or a value of 16 or more elements exceeds DOUBT × its limit.
        Return 6 if chance may explain why limits are exceeded, or 0 if none is exceeded.
        """
        precision = self.judged_in(precision)
        if self.void:
            return 0
        if self._broken(run, precision) or self._worst(run, precision, 16)[0] > DOUBT:
            return 2
        return 6 if self._worst(run, precision)[0] > 1 else 0

    def accuracy(self, run: ObservedRun, precision: str) -> Accuracy:
        """Return the verdict: as exact as the baseline, rounding, wrong, or not checked."""
        precision = self.judged_in(precision)
        if self.void:
            return Accuracy("not checked", self.void)
        if fault := self._broken(run, precision):
            return fault
        numbers, (times, why) = self._numbers(run, precision), self._worst(run, precision)
        if times > DOUBT:
            return Accuracy("wrong", why, **numbers)
        if times > 1:
            why = f"{why}, due to either the network or the plan"
        elif not (why := self._lack(run, precision)):
            errors = [(_distance(run, kind), _distance(self.own, kind)) for kind in COMPARED]
            same = all(it is not None and it <= 2 * (own or 0) + AS_EXACT for it, own in errors)
            return Accuracy("exact" if same else "rounding", self._moved(run), **numbers)
        return Accuracy("not checked", why, **numbers)

    def accuracy_of_other_model(self, run: ObservedRun, precision: str) -> Accuracy:
        """Judge a changed model: "wrong" if broken or untrained, "not checked" or "other model"."""
        if self.void:
            return Accuracy("not checked", self.void)
        if fault := self._broken(run, precision := self.judged_in(precision), other=True):
            return fault
        known = [(name, row, row.error) for (_, name), row in run.rows.items() if row.error]
        for name, row, error in known:
            if row.kind == "parameter" and abs(error.distance - 1.0) < AS_EXACT:
                return Accuracy("wrong", f"{name} is not trained")
        losses = [error.distance for name, _, error in known if name == "loss"]
        numbers = self._numbers(run, precision)
        return Accuracy("other model", **numbers, loss_error=max(losses, default=None))

    def _worst(self, run: ObservedRun, precision: str, least: int = 0) -> tuple[float, str]:
        """Return the worst deviation ÷ limit, and a description. Skip sizes below `least`."""
        worst = (0.0, "")
        for place, row in run.rows.items():
            times, words = self._excess(place, row, precision)
            if times > worst[0] and row.size >= least and place not in self.unlike:
                name = _called(row.kind, place[1])
                worst = times, f"{name} {words}" if row.error else f"other result: {name} {words}"
        return worst

    def _excess(self, place: Place, row: ObservedDifference, precision: str) -> tuple[float, str]:
        """Return a value's deviation ÷ limit (DOUBT or 0 for integers, text), and a description."""
        known = self._explaining(place, row, precision)
        if row.count and row.kind != "given":
            share = SCATTER * self._explained(precision)
            words = _beyond(row, [one for one, _ in known], share)
            return (DOUBT, words) if words else (0.0, "")
        if row.error is None or row.kind not in LIMITS or place[0] not in self.trace:
            return 0.0, ""
        control = _control(known)
        times, words = beyond_limit(row.error, row.size, control, row.kind, precision)
        return (times if control else min(times, DOUBT)), words  # not wrong without a control

    def _explaining(
        self, place: Place, row: ObservedDifference, precision: str
    ) -> list[tuple[ObservedDifference, float]]:
        """Return the rows of control runs and the baseline that explain the value at `place`.

        Each row has a factor for its deviation: usually 1. A run without a row at `place` provides
        its last row of this kind and name, with the factor 3.
        """
        found = []
        for run in (*self.controls.get(precision, ()), self.own):
            known, times = run.rows.get(place), 1.0
            if known is None:
                known, times = run.latest.get((row.kind, place[1])), 3.0
            found += [] if known is None else [(known, times)]
        return found

    def _broken(self, run: ObservedRun, precision: str, other: bool = False) -> Accuracy | None:
        """Return a verdict for wrong shapes, dtypes, step counts or non-finite values; else None.

        If the plan changes the model (`other`), weights may change shape, and results their dtype.
        """
        steps, unfit = self._other_steps(run), {} if run.diverged else self._unfit(run)
        if other:
            unfit = {p: row for p, row in unfit.items() if row.kind in (*RESULTS, "gradient")}
        if steps or unfit:
            for control in self.controls.get(precision, ()):
                if control.diverged or self._other_steps(control) or self._unfit(control):
                    why = "rounding alone decides how many results there are"
                    return Accuracy("not checked", why)
            kinds = [row.kind.rstrip("s") for row in unfit.values()]
            why = f"another number or shape of {next(iter(kinds), '')}s than the baseline's"
            return Accuracy("wrong", steps or why)
        for place, row in run.rows.items():
            own, name = self.baseline.rows.get(place, row), place[1]
            is_result = row.kind in RESULTS and not other
            if not row.is_finite and own.is_finite:
                return Accuracy("wrong", f"{row.kind}s are not finite")
            if is_result and row.dtype not in {"", own.dtype, DTYPES.get(precision)}:
                return Accuracy("wrong", f"{name} is {row.dtype}, not {own.dtype}")
        return None

    def _other_steps(self, run: ObservedRun) -> str:
        pairs = zip(run.ends, self.baseline.ends, strict=False)
        found = (f"it makes {n} optimizer steps instead of {own}" for n, own in pairs if n != own)
        return next(found, "")

    def _unfit(self, run: ObservedRun) -> dict[Place, ObservedDifference]:
        """Return values of other shapes, and values that are missing in completed calls."""
        gone = self.baseline.rows.keys() - run.rows
        unfit = {one: self.baseline.rows[one] for one in gone if one[0][0] < len(run.ends)}
        return unfit | {one: row for one, row in run.rows.items() if not row.fits}

    def _lack(self, run: ObservedRun, precision: str) -> str:
        """Return the reason why no comparison could have failed; empty if one could have failed."""
        compared = [
            _control(self._explaining(place, row, precision))
            for place, row in run.rows.items()
            if row.kind in COMPARED and row.error and row.size
        ]
        if any(control is None or control.distance < 1 for control in compared):
            return ""
        if compared:
            return f"rounding to {precision} alone moves all that was compared by its own size"
        why = "no model was called, there was no backward pass and no result to compare"
        return f"{why}: end the step with its result"

    def _moved(self, run: ObservedRun) -> str:
        """Return a description of a result with integers that differ by rounding; empty if none."""
        for place, row in run.rows.items():
            own, is_result = self.baseline.rows.get(place), place[0][3] == "result"
            if is_result and row.size > 1 and row.count and not (own and own.count):
                return f"{place[1]} {_differing(row)}, which rounding alone explains"
        return ""

    def _numbers(self, run: ObservedRun, precision: str) -> dict[str, Any]:
        numbers: dict[str, Any] = {}
        for kind in COMPARED:
            numbers[f"{kind}_error"] = _distance(run, kind)
            numbers[f"baseline_{kind}_error"] = _distance(self.own, kind)
        return numbers | {"explained_output": self._explained(precision)}

    def _explained(self, precision: str) -> float:
        runs = (*self.controls.get(precision, ()), self.own)
        return max([2 * unit(precision), *(_distance(run, "output") or 0.0 for run in runs)])


def _control(known: Sequence[tuple[ObservedDifference, float]]) -> Deviation | None:
    fitting = [(row.error, times) for row, times in known if row.fits and row.error]
    errors = [[times * value for value in error] for error, times in fitting]
    return Deviation(*map(max, zip(*errors, strict=True))) if errors else None


def _beyond(row: ObservedDifference, known: Sequence[ObservedDifference], share: float) -> str:
    """Return a description of differing integers or text; empty if control runs explain them."""
    counts, is_free = max((each.count for each in known), default=0), row.kind == "result"
    if not row.size:
        return "" if counts or is_free else "is another text"
    share += 0.01 if is_free else 0.0  # 1 % more after steps that are not compared
    if row.size == 1:  # a count of hits, for example
        limit = 2 * max((each.most for each in known), default=0.0) + share * row.largest
        is_beyond = math.ceil(row.most) > limit
        return f"is off by {row.most:g}, beyond the {limit:.2g} of rounding" if is_beyond else ""
    limit = 2 * counts + SCATTER * math.sqrt(counts) + share * row.size
    words = f"{_differing(row)}, beyond the {int(limit)} of rounding"
    return words if row.count > limit else ""


def _differing(row: ObservedDifference) -> str:
    return f"differs in {row.count} of {row.size} integers, first at position {row.first}"


def _distance(run: ObservedRun, kind: str) -> float | None:
    whole = deviations.total([row.sums for row in run.rows.values() if row.kind == kind])
    distance = whole.deviation().distance
    return distance if math.isfinite(distance) else None


def _called(kind: str, name: str) -> str:
    if kind.startswith("gradient"):
        return f"gradient of {name}" if name else kind
    return name if kind in RESULTS else f"{'parameter' if kind == 'moved' else kind} {name}"


def beyond_limit(
    found: Deviation, size: int, control: Deviation | None, kind: str, precision: str
) -> tuple[float, str]:
    """Return the worst deviation ÷ limit, and a description; 0 if rounding explains every error."""
    times, share, roundings = LIMITS[kind]
    known = control or Deviation(*[8 * unit(precision)] * 3)  # a typical deviation
    if known.distance >= 1:  # rounding alone changes the tensor by its own size
        return 0.0, ""
    # A control run may have no scale or bias by chance. So its distance, spread over the elements,
    # counts too. 64 elements count as one error: in a row or channel they may share a rounding.
    spread = known.distance * min(1.0, math.sqrt(64 / max(size, 1)))
    # Normalization divides a scattered signal by sqrt(1 + distance**2): about 1 + distance**2 / 2.
    spread += known.distance**2 / 2
    share += roundings * unit(precision) * (TERMS if precision == "fp32" else 1.0)
    explained = [
        ("off", found.distance, times * known.distance),
        ("scaled", found.scale, 4.0 * (known.scale + spread)),
        ("shifted", found.bias, 4.0 * (known.bias + spread)),
    ]
    worst = (0.0, "")
    # A maximum that rounding switches shifts whole gradients, so `bias` counts in outputs only.
    for word, value, most in explained if kind == "output" else explained[:2]:
        most += share
        excess = math.inf if math.isnan(value) else value / most
        if excess > worst[0]:
            worst = excess, f"{word} by {value:.2g}, where {precision} explains {most:.2g}"
    return worst

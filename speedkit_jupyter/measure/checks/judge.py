"""The verdict on a variant: one number, which is how far its worst tensor is beyond its limit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from speedkit_jupyter.measure.checks.accuracy import Accuracy
from speedkit_jupyter.measure.checks.deviations import UNDETERMINED, Deviation, Sums, excess
from speedkit_jupyter.measure.checks.observer import Look, Run, Seen
from speedkit_jupyter.measure.checks.reference import parameters_of
from speedkit_jupyter.measure.checks.rounding import lowest, noted_autocast, of_parameters, unit
from speedkit_jupyter.measure.checks.trials import Trials
from speedkit_jupyter.measure.checks.values import is_plain
from speedkit_jupyter.measure.rounds import other_threads
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

    `covered` are the looks of the trace that are in float64, `controls` the runs with each
    precision's rounding, `own` the precision that the step lowers itself to. `unlike` are results
    that the baseline gives otherwise each time. `void` says why nothing can be judged.
    """

    trials: Trials
    first: Runner
    trace: dict[str, Look] = field(default_factory=dict)
    baseline: Run = field(default_factory=Run)
    covered: frozenset[str] = frozenset()
    controls: dict[str, list[Run]] = field(default_factory=dict)
    own: str = "fp32"
    unlike: set[tuple[str, str]] = field(default_factory=set)
    void: str = ""

    def prepare(self) -> None:
        """Run the step in float64 and the baseline."""
        __tracebackhide__ = True
        models, trials = self.first.step.models, self.trials
        held = parameters_of([*models, *self.first.step.optimizers])
        with other_threads.noted(models) as calls:
            # An error inside its forward pass breaks a sharded model.
            if all(map(is_plain, held)):
                trials.reference(self.first, self.trace)
        if calls.in_pythons:  # float64 would reach the model there, and not its input
            self.trace.clear()
        self.covered = frozenset(self.trace)
        with noted_autocast() as entered, other_threads.noted(models) as calls:
            self.baseline = trials.run(self.first, self.trace, extends=True)
        self.own = lowest(*entered, *of_parameters(held))
        if calls.only_elsewhere:
            self.void = other_threads.NOT_REACHED
            return
        if self.covered and not self._follows():
            self.trace, self.covered = {}, frozenset()
            self.baseline = trials.run(self.first, self.trace, extends=True)
        if not self.covered:  # nothing else has shown that the step computes the same each time
            self.note_unlike()
        if not all(seen.is_finite for seen in self.baseline.looks.values()):
            self.void = "the step itself gives numbers that are not finite"

    def _follows(self) -> bool:
        """Return whether float64 computes the same as the baseline, but for what that rounds."""
        looks = [self.baseline.looks.get(key) for key in self.covered]
        if not all(seen is not None and seen.fits for seen in looks):
            return False
        outputs = [
            e for seen in looks if seen and seen.kind == "output" for e in seen.errors.values()
        ]
        return self.own != "fp32" or max((e.distance for e in outputs), default=0.0) <= RANDOM

    def add_control(self, precision: str, scale: float) -> None:
        """Run one more control of this precision."""
        runs = self.controls.setdefault(precision, [])
        in_float64 = bool(self.covered) and self.own != "fp32"
        run = self.trials.control(self.first, self.trace, precision, len(runs), scale, in_float64)
        runs += [] if run is None else [run]

    def note_unlike(self) -> None:
        """Run the baseline once more, and note what it gives otherwise by itself."""
        run, precision = self.trials.run(self.first, self.trace), self.own
        for key, name, seen, error in self._errors(run):
            if self._excess(key, name, seen, error, precision)[0] > 1:
                if seen.kind != "output" or not name.startswith("result"):
                    what = _called(seen.kind, name)
                    self.void = f"the step computes something else each time it runs ({what})"
                self.unlike.add((key, name))
        for key, seen in run.looks.items():
            changed = [name for name, row in seen.integers.items() if row[0]] + seen.words
            known = self.baseline.looks.get(key)
            covered = [] if known is None else [n for n, row in known.integers.items() if row[0]]
            self.unlike |= {(key, name) for name in changed if name not in covered}

    def judged_in(self, precision: str) -> str:
        """The lower one of a variant's and the step's own."""
        return lowest(precision, self.own)

    def verdict(self, run: Run, precision: str, evidence: Iterable[object] = ()) -> Accuracy:
        """Return exact as the baseline, rounding as its dtype brings, wrong, or not checked.

        Each turn of `evidence` adds to what is known; it is asked only before an accusation.
        """
        precision = self.judged_in(precision)
        if not self.void and (fault := self._broken(run, precision)):
            return fault
        times, why = self.worst(run, precision)
        more = iter(evidence)
        while times > 1 and not self.void and next(more, self) is not self:
            times, why = self.worst(run, precision)
        if self.void:
            return Accuracy("not checked", self.void)
        numbers = self._numbers(run, precision)
        if times > DOUBT:
            return Accuracy("wrong", why, **numbers)
        doubt = f"{why}, which may be the net or the plan" if times > 1 else ""
        if not doubt and (other := self._other_result(run, precision)):
            doubt = f"other result: {other}"
        if doubt := doubt or self._lack(run, precision):
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
        losses = []
        for seen in run.looks.values():
            for name, error in seen.errors.items():
                if seen.kind == "parameter" and abs(error.distance - 1.0) < SAME:
                    return Accuracy("wrong", f"{name} is not trained")
                if name.startswith("loss") and not seen.is_free:
                    losses.append(error.distance)
        numbers = self._numbers(run, precision)
        return Accuracy("other model", **numbers, loss_error=max(losses, default=None))

    def worst(self, run: Run, precision: str) -> tuple[float, str]:
        """Return how many times its limit the worst tensor is off, and that in words."""
        worst = (0.0, "")
        for key, name, seen, error in self._errors(run):
            times, words = self._excess(key, name, seen, error, precision)
            if times > worst[0] and (key, name) not in self.unlike:
                worst = times, f"{_where(seen)}{_called(seen.kind, name)} {words}"
        return worst

    def _excess(
        self, key: str, name: str, seen: Seen, error: Deviation, precision: str
    ) -> tuple[float, str]:
        kind = seen.kind if name else "gradients"
        return excess(error, self._control(key, name, precision), kind, precision)

    def _errors(self, run: Run) -> Iterator[tuple[str, str, Seen, Deviation]]:
        """All that was compared; gradients together too, without a name."""
        for key, seen in run.looks.items():
            if seen.is_free or key not in self.trace:
                continue
            for name, error in seen.errors.items():
                yield key, name, seen, error
            if seen.kind == "gradient" and len(seen.errors) > 1:
                yield key, "", seen, seen.pooled

    def _control(self, key: str, name: str, precision: str) -> Deviation | None:
        """How far rounding moves a tensor: in this look, or in the last one that has it."""
        kind = self.trace[key].kind
        names = self.trace[key].values.numbers.keys()
        known = []
        for run in self._explaining(precision):
            looks, times = [run.looks[key]] if key in run.looks else [], 1.0
            if not looks:
                alike = [seen for seen in run.looks.values() if seen.kind == kind]
                looks, times = [seen for seen in alike if seen.errors.keys() == names], LIKE
            usable = [seen for seen in looks if seen.fits and not seen.is_free]
            found = [seen.errors.get(name) if name else seen.pooled for seen in usable]
            known += [error.times(times) for error in found[-1:] if error is not None]
        if not known:
            return None
        values = [(error.distance, error.scale, error.bias) for error in known]
        return Deviation(known[0].size, *map(max, zip(*values, strict=True)))

    def _explaining(self, precision: str) -> list[Run]:
        """The controls, and the baseline's looks that were compared with float64."""
        looks = self.baseline.looks
        own = Run({key: seen for key, seen in looks.items() if key in self.covered})
        return [*self.controls.get(precision, ()), own]

    # What is wrong whatever it computes.

    def _broken(self, run: Run, precision: str, other: bool = False) -> Accuracy | None:
        """`other` is whether it is another model, whose weights may have other shapes."""
        calls = min(len(run.ends), len(self.baseline.ends))
        if run.ends[:calls] != self.baseline.ends[:calls]:
            mine, theirs = run.ends[calls - 1], self.baseline.ends[calls - 1]
            return Accuracy("wrong", f"it makes {mine} optimizer steps instead of {theirs}")
        gone = [key for key in self.trace.keys() - run.looks if int(key.split()[0]) < len(run.ends)]
        others: list[Seen | Look] = [seen for seen in run.looks.values() if not seen.fits]
        others += [self.trace[key] for key in gone]
        others = [] if run.diverged else others
        if other:
            others = [seen for seen in others if seen.kind in ("output", "gradient")]
        if others:
            for control in self.controls.get(precision, ()):
                if control.diverged or not all(seen.fits for seen in control.looks.values()):
                    return Accuracy("not checked", BY_CHANCE)
            what = f"another number or shape of {others[0].kind}s than the baseline's"
            return Accuracy("wrong", f"{_where(others[0])}{what}")
        for key, seen in run.looks.items():
            if not seen.is_finite and self.baseline.looks[key].is_finite:
                return Accuracy("wrong", f"{_where(seen)}{seen.kind}s are not finite")
            if fault := "" if other else self._other_dtype(key, seen, precision):
                return Accuracy("wrong", fault)
            for name in seen.words:
                if name.endswith(MODES) and not (other and name.endswith("requires_grad")):
                    return Accuracy("wrong", f"{name} is left otherwise than by the baseline")
        return None

    def _other_dtype(self, key: str, seen: Seen, precision: str) -> str:
        known = self.baseline.looks[key].dtypes if key in self.baseline.looks else {}
        lowered = {"bf16": "bfloat16", "fp16": "float16"}.get(precision)
        for name, dtype in seen.dtypes.items():
            if dtype not in (known.get(name, dtype), lowered):
                what = f"{_where(seen)}{_called(seen.kind, name)}"
                return f"{what} is {dtype} instead of {known[name]}"
        return ""

    # Integers and words.

    def _other_result(self, run: Run, precision: str) -> str:
        moved = self._numbers(run, precision)["explained_output"]
        for key, seen in run.looks.items():
            if seen.kind == "given":
                continue
            controls = [run.looks[key] for run in self._explaining(precision) if key in run.looks]
            share = OF_OUTPUT * moved + (FREE if seen.is_free else 0.0)
            for name, (count, size, most, largest) in seen.integers.items():
                known = [c.integers[name] for c in controls if name in c.integers]
                counts = max((row[0] for row in known), default=0)
                limit = 2 * counts + SCATTER * math.sqrt(counts) + share * size
                if size == 1:  # a count of hits, say
                    limit, count = share * largest, math.ceil(most)
                    limit += 2 * max((row[2] for row in known), default=0.0)
                if count > limit and (key, name) not in self.unlike:
                    what = f"{count} of {size} integers differ" if size > 1 else f"off by {most:g}"
                    where = f"{_where(seen)}{_called(seen.kind, name)}"
                    return f"{where}: {what}, where {precision} explains {int(limit)}"
            for name in () if seen.is_free else seen.words:
                if (key, name) not in self.unlike and not any(name in c.words for c in controls):
                    return f"{_where(seen)}{_called(seen.kind, name)} is another text"
        return ""

    def _lack(self, run: Run, precision: str) -> str:
        """Why nothing of all that was compared could have failed; empty where something could."""
        compared = [
            self._control(key, name, precision)
            for key, name, seen, error in self._errors(run)
            if seen.kind in ("output", "gradient") and error.size and name
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
            distances = [_distance(each, kind) for each in (run, *explaining)]
            numbers[f"{kind}_error"] = distances[0]
            numbers[f"baseline_{kind}_error"] = distances[-1] if self.covered else 0.0
            numbers[f"explained_{kind}"] = max(
                [d or 0.0 for d in distances[1:]] + [2 * unit(precision)]
            )
        whole = _whole(run, "gradient")
        norm = math.sqrt(max(whole.off + 2 * whole.product + whole.square, 0.0) * whole.square)
        numbers["gradient_cosine"] = (whole.product + whole.square) / norm if norm else None
        return numbers


def _whole(run: Run, kind: str) -> Sums:
    looks = [seen for seen in run.looks.values() if seen.kind == kind and not seen.is_free]
    return sum((seen.whole for seen in looks), Sums(0))


def _distance(run: Run, kind: str) -> float | None:
    distance = _whole(run, kind).deviation().distance
    return distance if math.isfinite(distance) else None


def _where(seen: Seen | Look) -> str:
    return f"{seen.place}: " if seen.place else ""


def _called(kind: str, name: str) -> str:
    if kind == "gradient":
        return f"gradient of {name}" if name else "gradients"
    return name if kind == "output" else f"{'parameter' if kind == 'moved' else kind} {name}"

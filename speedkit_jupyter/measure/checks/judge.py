"""The verdict on a variant: one number, which is how far its worst tensor is beyond its limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from speedkit_jupyter.measure.checks.accuracy import Accuracy
from speedkit_jupyter.measure.checks.deviations import (
    UNDETERMINED,
    Deviation,
    Sums,
    excess,
)
from speedkit_jupyter.measure.checks.observing.observer import Look, Run, Seen
from speedkit_jupyter.measure.checks.reference.promotion import is_sharded, parameters_of
from speedkit_jupyter.measure.checks.reference.rounding import (
    LOW,
    lowest,
    noted_autocast,
    of_parameters,
    unit,
)
from speedkit_jupyter.measure.checks.trials import Trials
from speedkit_jupyter.measure.rounds import confinement
from speedkit_jupyter.measure.rounds.runner import Runner

# What is beyond its limit by less may be the net or the plan: it is not accused, and can't win.
DOUBT = 2.0
# The step in float64 does what the baseline does where they are closer; else some code asks for its
# dtype, and float64 is no reference. Gradients differ by activations that tip over.
ALIKE = {"output": 2e-4, "gradient": 1e-2}
# A float32 output that is off by more is no rounding: the step computes something else each time.
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
# So many integers or words alone tell a right step from a wrong one; of fewer chance may decide.
EVIDENCE = 8
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

    trace: dict[str, Look]
    baseline: Run
    covered: frozenset[str] = frozenset()
    controls: dict[str, list[Run]] = field(default_factory=dict)
    own: str = "fp32"
    unlike: set[tuple[str, str]] = field(default_factory=set)
    void: str = ""

    def judged_in(self, precision: str) -> str:
        """The lower one of a variant's and the step's own."""
        return lowest(precision, self.own)

    def verdict(self, run: Run, precision: str, more: Callable[[int], bool]) -> Accuracy:
        """Return exact as the baseline, rounding as its dtype brings, wrong, or not checked.

        `more` does something before a variant is accused, first a second control, then the
        baseline once more, and says whether there is anything new.
        """
        precision = self.judged_in(precision)
        if self.void:
            return Accuracy("not checked", self.void)
        if fault := self._broken(run, precision):
            return fault
        times, why = self.worst(run, precision)
        for number in range(2):
            if times > 1 and more(number):
                times, why = self.worst(run, precision)
        if self.void:
            return Accuracy("not checked", self.void)
        numbers = self._numbers(run, precision)
        if times > DOUBT:
            return Accuracy("wrong", why, **numbers)
        if times > 1:
            doubt = f"{why}, which may be the net or the plan"
            return Accuracy("not checked", doubt, **numbers, doubtful=True)
        if other := self._other_result(run, precision):
            return Accuracy("not checked", f"other result: {other}", **numbers, doubtful=True)
        if lack := self._lack(run, precision):
            return Accuracy("not checked", lack, **numbers)
        pairs = (
            (numbers["output_error"], numbers["baseline_output_error"]),
            (numbers["gradient_error"], numbers["baseline_gradient_error"]),
        )
        same = all(mine is not None and mine <= 2 * (own or 0.0) + SAME for mine, own in pairs)
        return Accuracy("exact" if same else "rounding", **numbers)

    def distance(self, run: Run, precision: str) -> Accuracy:
        """Return how far off another model is, which is any distance; wrong is what is broken."""
        if self.void:
            return Accuracy("not checked", self.void)
        if fault := self._broken(run, self.judged_in(precision), other=True):
            return fault
        for seen in run.looks.values():
            for name, error in seen.errors.items():
                if seen.kind == "parameter" and abs(error.distance - 1.0) < SAME:
                    return Accuracy("wrong", f"{name} is not trained")
        losses = [
            error.distance
            for seen in run.looks.values()
            for name, error in seen.errors.items()
            if name.startswith("loss") and not seen.is_free
        ]
        numbers = self._numbers(run, precision)
        numbers["loss_error"] = max(losses, default=None)
        return Accuracy("other model", **numbers)

    def worst(self, run: Run, precision: str) -> tuple[float, str]:
        """Return how many times its limit the worst tensor is off, and that in words."""
        worst = (0.0, "")
        for key, name, seen, error in self._errors(run):
            kind = "gradients" if not name else seen.kind
            times, words = excess(error, self._control(key, name, precision), kind, precision)
            if times > worst[0] and (key, name) not in self.unlike:
                worst = times, f"{_where(seen)}{_called(seen.kind, name)} {words}"
        return worst

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
        known = []
        for run in (*self.controls.get(precision, ()), self._covered_baseline):
            looks, times = [run.looks[key]] if key in run.looks else [], 1.0
            if not looks:
                alike = [seen for seen in run.looks.values() if seen.kind == kind]
                names = self.trace[key].numbers.keys()
                looks, times = [seen for seen in alike if seen.errors.keys() == names], LIKE
            found = [error for seen in looks if (error := _error(seen, name)) is not None]
            known += [error.times(times) for error in found[-1:]]
        if not known:
            return None
        values = [(error.distance, error.scale, error.bias) for error in known]
        return Deviation(known[0].size, *map(max, zip(*values, strict=True)))

    @property
    def _covered_baseline(self) -> Run:
        """The baseline's looks that were compared with float64."""
        return Run({key: seen for key, seen in self.baseline.looks.items() if key in self.covered})

    # What is wrong whatever it computes.

    def _broken(self, run: Run, precision: str, other: bool = False) -> Accuracy | None:
        calls = min(len(run.ends), len(self.baseline.ends))
        by_chance = any(
            control.diverged or not all(seen.fits for seen in control.looks.values())
            for control in self.controls.get(precision, ())
        )
        if run.ends[:calls] != self.baseline.ends[:calls]:
            mine, theirs = run.ends[calls - 1], self.baseline.ends[calls - 1]
            return Accuracy("wrong", f"it makes {mine} optimizer steps instead of {theirs}")
        missing = [
            look
            for key, look in self.trace.items()
            if key not in run.looks and int(key.split()[0]) < len(run.ends)
        ]
        others: list[Seen | Look] = [seen for seen in run.looks.values() if not seen.fits]
        for seen in () if run.diverged else (*others, *missing):
            if other and seen.kind not in ("output", "gradient"):
                continue  # its weights may be of other numbers and shapes
            if by_chance:
                return Accuracy("not checked", BY_CHANCE)
            what = f"{_where(seen)}another number or shape of {seen.kind}s than the baseline's"
            return Accuracy("wrong", what)
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
        known = self.baseline.looks.get(key)
        lowered = [name for name, word in LOW.items() if word == precision]
        for name, dtype in seen.dtypes.items() if known is not None else ():
            expected = known.dtypes.get(name, dtype)  # type: ignore[union-attr]
            if dtype not in (expected, *lowered):
                return f"{_where(seen)}{_called(seen.kind, name)} is {dtype} instead of {expected}"
        return ""

    # Integers and words.

    def _other_result(self, run: Run, precision: str) -> str:
        moved = self._numbers(run, precision)["explained_output"]
        for key, seen in run.looks.items():
            controls = [c.looks[key] for c in self.controls.get(precision, ()) if key in c.looks]
            if key in self.covered:
                controls.append(self.baseline.looks[key])
            for name, (count, size, most, largest) in seen.integers.items():
                if not count or seen.kind == "given" or (key, name) in self.unlike:
                    continue
                known = [c.integers[name] for c in controls if name in c.integers]
                counts = max((row[0] for row in known), default=0)
                mosts = max((row[2] for row in known), default=0.0)
                share = OF_OUTPUT * (moved or 0.0) + (FREE if seen.is_free else 0.0)
                limit = 2 * counts + SCATTER * math.sqrt(counts) + share * size
                if size == 1:
                    limit, count = 2 * mosts + share * largest, math.ceil(most)
                if count > limit:
                    what = f"{count} of {size} integers differ" if size > 1 else f"off by {most:g}"
                    where = f"{_where(seen)}{_called(seen.kind, name)}"
                    return f"{where}: {what}, where {precision} explains {int(limit)}"
            words = [name for name in seen.words if (key, name) not in self.unlike]
            words = [name for name in words if not any(name in c.words for c in controls)]
            if words and not seen.is_free:
                return f"{_where(seen)}{_called(seen.kind, words[0])} is another text"
        return ""

    def _lack(self, run: Run, precision: str) -> str:
        """Why nothing of all that was compared could have failed; empty where something could."""
        known = exact = undetermined = 0
        for key, name, seen, error in self._errors(run):
            if seen.kind in ("output", "gradient") and error.size and name:
                control = self._control(key, name, precision)
                is_told = control is None or control.distance < UNDETERMINED
                known, undetermined = known + is_told, undetermined + (not is_told)
        for seen in run.looks.values():
            exact += seen.evidence * (seen.kind == "output")
        if known or (exact >= EVIDENCE and not undetermined):
            return ""
        if undetermined:
            return f"rounding to {precision} alone moves all that was compared by its own size"
        if exact:
            return "the step gives too few integers and words to tell rounding from errors"
        names = ", ".join(dict.fromkeys(run.unknown))
        return f"it gives nothing that can be compared: {names}" if names else NOTHING_TO_COMPARE

    # Numbers of a verdict.

    def _numbers(self, run: Run, precision: str) -> dict[str, Any]:
        baseline = self._covered_baseline
        controls = [*self.controls.get(precision, ()), baseline]
        numbers: dict[str, Any] = {}
        for kind in ("output", "gradient"):
            numbers[f"{kind}_error"] = _distance(run, kind)
            numbers[f"baseline_{kind}_error"] = _distance(baseline, kind) if self.covered else 0.0
            known = [_distance(control, kind) or 0.0 for control in controls]
            numbers[f"explained_{kind}"] = max([*known, 2 * unit(precision)])
        whole = _whole(run, "gradient")
        norm = math.sqrt(max(whole.off + 2 * whole.product + whole.square, 0.0) * whole.square)
        numbers["gradient_cosine"] = (whole.product + whole.square) / norm if norm else None
        return numbers


def _error(seen: Seen | None, name: str) -> Deviation | None:
    if seen is None or not seen.fits or seen.is_free:
        return None
    if not name:
        return seen.pooled
    return seen.errors.get(name)


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


def made(trials: Trials, runner: Runner) -> Judge:
    """Return what variants are judged by: the baseline's steps, and the same in float64.

    The stages of a search begin in the same state: what an earlier one has found is used again.
    """
    __tracebackhide__ = True
    kept, begins = runner.step.kept, trials.fingerprint(runner)
    if "judge" in kept and kept["judge"][1] == begins:
        judge, _, trials.is_random, trials.drawn_inside = kept["judge"]
        return judge  # type: ignore[no-any-return]
    judge = _made(trials, runner)
    kept["judge"] = judge, begins, trials.is_random, trials.drawn_inside
    return judge


def _made(trials: Trials, runner: Runner) -> Judge:
    trace: dict[str, Look] = {}
    held = parameters_of([*runner.step.models, *runner.step.optimizers])
    with confinement.calls_noted(runner.step.models) as calls:
        if not any(
            map(is_sharded, held)
        ):  # an error inside its forward pass breaks a sharded model
            trials.reference(runner, trace)
    if calls.in_pythons:  # float64 would reach the model there, and not its input
        trace.clear()
    covered = frozenset(trace)
    with noted_autocast() as entered, confinement.calls_noted(runner.step.models) as calls:
        baseline = trials.run(runner, trace, extends=True)
    judge = Judge(trace, baseline, covered, own=lowest(*entered, *of_parameters(held)))
    if calls.only_elsewhere:
        judge.void = confinement.NOT_REACHED
    elif covered and not _follows(judge, trials, runner):
        judge.trace, judge.covered = {}, frozenset()
        judge.controls.clear()
        judge.baseline = trials.run(runner, judge.trace, extends=True)
    if not judge.covered:  # nothing else has shown that the step computes the same each time
        note_unlike(judge, trials.run(runner, judge.trace), judge.own)
    if not all(seen.is_finite for seen in judge.baseline.looks.values()):
        judge.void = "the step itself gives numbers that are not finite"
    return judge


def _output_distance(run: Run) -> float:
    """Return the largest relative distance of an output from the reference."""
    looks = [seen for seen in run.looks.values() if seen.kind == "output"]
    return max((e.distance for seen in looks for e in seen.errors.values()), default=0.0)


def _follows(judge: Judge, trials: Trials, runner: Runner) -> bool:
    """Return whether float64 computes the same as the baseline, but for what that rounds."""
    run = Run(
        {key: judge.baseline.looks.get(key, Seen("", "", fits=False)) for key in judge.covered}
    )
    if not all(seen.fits for seen in run.looks.values()):
        return False
    close = all(
        error.distance <= ALIKE.get(seen.kind, math.inf)
        for seen in run.looks.values()
        for error in seen.errors.values()
    )
    if close:
        return True
    if judge.own == "fp32" and _output_distance(run) > RANDOM:
        return False
    add_control(judge, trials, runner, judge.own, 1 if judge.own == "fp32" else 0)
    covered, judge.covered = judge.covered, frozenset()  # the baseline is no control of its own
    explained = judge.worst(run, judge.own)[0] <= 1
    judge.covered = covered
    return explained


def add_control(
    judge: Judge, trials: Trials, runner: Runner, precision: str, number: int, scale: float = 1.0
) -> bool:
    """Run one more control of this precision; return whether there is one now."""
    runs = judge.controls.setdefault(precision, [])
    in_float64 = bool(judge.covered) and judge.own != "fp32"
    run = trials.control(runner, judge.trace, precision, number, scale, in_float64)
    runs += [] if run is None else [run]
    return run is not None


def note_unlike(judge: Judge, run: Run, precision: str) -> bool:
    """Note what the baseline, run once more, gives otherwise by itself; return whether anything."""
    before = len(judge.unlike)
    for key, name, seen, error in judge._errors(run):
        first = judge._control(key, name, precision)
        if excess(error, first, "gradients" if not name else seen.kind, precision)[0] > 1:
            if seen.kind != "output" or not name.startswith("result"):
                what = _called(seen.kind, name)
                judge.void = f"the step computes something else each time it runs ({what})"
            judge.unlike.add((key, name))
    for key, seen in run.looks.items():
        changed = [name for name, row in seen.integers.items() if row[0]] + seen.words
        known = judge.baseline.looks.get(key)
        covered = [] if known is None else [n for n, row in known.integers.items() if row[0]]
        judge.unlike |= {(key, name) for name in changed if name not in covered}
    return len(judge.unlike) > before

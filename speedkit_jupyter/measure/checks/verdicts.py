"""The verdict on a variant: of each stretch of its steps by itself, then of all together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from speedkit_jupyter.measure.checks.accuracy import NOTHING_TO_COMPARE, Accuracy, Yardstick
from speedkit_jupyter.measure.checks.course import LEFT, Course
from speedkit_jupyter.measure.checks.deviation import Errors, errors
from speedkit_jupyter.measure.checks.extrapolated import extrapolated, with_alike
from speedkit_jupyter.measure.checks.modes import missed
from speedkit_jupyter.measure.checks.observation import Observation
from speedkit_jupyter.measure.checks.rounding import lowest
from speedkit_jupyter.measure.checks.ways import astray
from speedkit_jupyter.measure.checks.wording import enough, misspelt

BY_CHANCE = (
    "rounding alone decides how many results there are: values decide how often the model is called"
)


@dataclass
class Judge:
    """What variants are judged by: a yardstick for each stretch of the baseline's course.

    `covered` are the stretches that there is a float64 reference for, `controls` the courses with
    each precision's rounding, `further` those that were run before a variant was accused. `own` is
    the precision that the step lowers itself to. `void` says why nothing can be judged.
    """

    baseline: Course
    stretches: dict[int, Yardstick]
    covered: frozenset[int] = frozenset()
    controls: dict[str, Sequence[Course]] = field(default_factory=dict)
    further: dict[str, Sequence[Course]] = field(default_factory=dict)
    precisions: set[str] = field(default_factory=set)
    void: str = ""
    own: str = "fp32"

    def judged_in(self, precision: str) -> str:
        """The lower one of a variant's and the step's own."""
        return lowest(precision, self.own)

    def judge(
        self, seen: Course, precision: str, more: Callable[[], Sequence[Course]] | None = None
    ) -> Accuracy:
        """Of a stretch that is wrong; else of the first one, unless a later one is open.

        `more` runs further controls before a variant is accused by a narrow margin.
        """
        if self.void or self.stretches[0].void:
            return Accuracy("not checked", self.void or self.stretches[0].void)
        precision = self.judged_in(precision)
        found = {
            number: self._of_stretch(number, seen, precision, more)
            for number in self.stretches
            if number in seen.stretches
        }
        for number, one in found.items():
            if one.verdict == "wrong":
                return replace(one, reason=f"{self._where(number)}{one.reason}")
        if seen.ends != self.baseline.ends:
            return self._of_another_length(seen, precision)
        return self._together(found, seen is self.baseline)

    def _of_stretch(
        self,
        number: int,
        course: Course,
        precision: str,
        more: Callable[[], Sequence[Course]] | None,
    ) -> Accuracy:
        seen = course.stretches[number]
        known, theirs = self.stretches[number], self.baseline.stretches[number]
        if known.void:
            return Accuracy("not checked", known.void)
        surer = None if more is None else partial(self._more, number, precision, more)
        before = [
            (course.stretches[one], self.baseline.stretches[one])
            for one in self.stretches
            if one < number and one in course.stretches
        ]
        found = known.judge(seen, precision, surer, before)
        earlier = [one for pair in before for one in pair]
        what = self._besides(number, seen, precision, earlier)
        if what and more is not None and precision not in self.further:
            self._more(number, precision, more)  # before a variant is accused
            what = self._besides(number, seen, precision, earlier)
        if what and found.verdict != "wrong":
            return replace(found, verdict="wrong", reason=what)
        if found.verdict == "wrong" and self._fits_by_chance(number, seen, precision):
            return Accuracy("not checked", BY_CHANCE)
        if found.verdict == "not checked" and not theirs.has_numbers() and enough(theirs):
            return replace(found, verdict="exact", reason="")
        # What lies in the user's objects may be another kind of thing in another precision.
        if theirs.role == LEFT and found.verdict == "wrong" and not self._fits(number, seen):
            return Accuracy("not checked", found.reason)
        return found

    def _besides(
        self, number: int, seen: Observation, precision: str, before: Sequence[Observation]
    ) -> str:
        """What is wrong beside its results and gradients."""
        known, theirs = self.stretches[number], self.baseline.stretches[number]
        others = [*self._controls(number, precision), known.reference]
        return (
            misspelt(seen, theirs, others, precision)
            or missed(seen, theirs, others)
            or astray(seen, theirs, others, known.names, before)
        )

    def _fits_by_chance(self, number: int, seen: Observation, precision: str) -> bool:
        """Whether it gives others in number or shape, as rounding alone does: in a loop that ends
        once its values are close, say.
        """
        if self._fits(number, seen):
            return False
        return not all(self._fits(number, one) for one in self._controls(number, precision))

    def _fits(self, number: int, seen: Observation) -> bool:
        known = self.stretches[number]
        return errors(seen, known.reference, known.dropped).fits

    def _more(
        self, number: int, precision: str, more: Callable[[], Sequence[Course]]
    ) -> list[Errors]:
        """How far further controls are off in a stretch; they are run once."""
        if precision not in self.further:
            self.further[precision] = more()
            self.controls[precision] = [*self.controls.get(precision, ()), *self.further[precision]]
        known = {
            one: self._off_in(one, self.further[precision])
            for one in self.stretches
            if not self.stretches[one].void
        }
        there = self.baseline.stretches
        return with_alike(number, known, there) or extrapolated(number, known, there)

    def _off_in(self, number: int, courses: Sequence[Course]) -> list[Errors]:
        known = self.stretches[number]
        there = [one.stretches[number] for one in courses if number in one.stretches]
        found = [errors(one, known.reference, known.dropped) for one in there]
        return [one for one in found if one.fits]

    def _controls(self, number: int, precision: str) -> list[Observation]:
        courses = self.controls.get(precision, ())
        return [one.stretches[number] for one in courses if number in one.stretches]

    def _of_another_length(self, seen: Course, precision: str) -> Accuracy:
        counts = [one.ends for one in self.controls.get(precision, ())]
        mine, theirs = seen.count, self.baseline.count
        what = f"{mine} stretches between optimizer steps, the baseline's {theirs}"
        if any(one[:1] != self.baseline.ends[:1] for one in counts if one):
            return Accuracy(
                "not checked", f"rounding alone decides how many steps it takes: {what}"
            )
        return Accuracy("wrong", f"another number of optimizer steps: {what}")

    def _together(self, found: dict[int, Accuracy], is_baseline: bool) -> Accuracy:
        telling = {n: one for n, one in found.items() if self._tells(n, one)}
        if not telling:
            others = [one for one in found.values() if one.reason != NOTHING_TO_COMPARE]
            return (others or list(found.values()))[0]
        first = next(iter(telling))
        for number, one in telling.items():
            if one.verdict == "not checked" and (number == first or self._is_work(number)):
                where = self._where(number)
                why = f"only what comes before is checked: {where}" if number != first else where
                return replace(one, reason=f"{why}{one.reason}")
        checked = [one for one in telling.values() if one.verdict != "not checked"]
        rounded = [one for one in checked if one.verdict == "rounding"]
        chief = max(rounded or checked, key=_weight)
        if not is_baseline and len(checked) < len(telling):
            more = "what it returns can't be told from rounding, and is not checked"
            chief = replace(chief, reason="; ".join(filter(None, (chief.reason, more))))
        return chief

    def _tells(self, number: int, found: Accuracy) -> bool:
        """Whether there is anything in the stretch that could have failed."""
        if found.verdict != "not checked":
            return (
                self.baseline.stretches[number].has_numbers()
                or found.verdict == "rounding"
                or (bool(found.verdict) and found.output_error is not None)
            )
        one = self.baseline.stretches[number]
        return one.role != LEFT and one.has_numbers()

    def _is_work(self, number: int) -> bool:
        """What the models do in it, not only what is returned at its end."""
        one = self.baseline.stretches[number]
        return bool(one.calls) or one.has_gradients()

    def _where(self, number: int) -> str:
        """In words; empty where it is the step's beginning."""
        step, taken = self.baseline.stretches[number].place
        after = "" if not taken else f"after {taken} optimizer step{'s' * (taken > 1)}"
        of_step = "" if not step else f"in step {step + 1}"
        words = " ".join(filter(None, (of_step, after)))
        return f"{words}: " if words else ""


def _weight(found: Accuracy) -> float:
    """The more a stretch is off, the more it says of the variant."""
    return max(found.output_error or 0.0, found.gradient_error or 0.0)

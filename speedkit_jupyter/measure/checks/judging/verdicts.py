"""The verdict on a variant: of each stretch of its steps by itself, then of all together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from speedkit_jupyter.measure.checks.accuracy import Accuracy
from speedkit_jupyter.measure.checks.comparing.errors import Errors, errors
from speedkit_jupyter.measure.checks.comparing.modes import missed
from speedkit_jupyter.measure.checks.comparing.parameter_moves import astray
from speedkit_jupyter.measure.checks.comparing.wording import enough, misspelt
from speedkit_jupyter.measure.checks.judging.extrapolated import extrapolated, with_alike
from speedkit_jupyter.measure.checks.judging.yardstick import NOTHING_TO_COMPARE, Yardstick
from speedkit_jupyter.measure.checks.observing.course import LEFT, Course
from speedkit_jupyter.measure.checks.observing.observation import Observation
from speedkit_jupyter.measure.checks.reference.rounding import lowest

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
        self, course: Course, precision: str, more: Callable[[], Sequence[Course]] | None = None
    ) -> Accuracy:
        """Of a stretch that is wrong; else of the first one, unless a later one is open.

        `more` runs further controls before a variant is accused by a narrow margin.
        """
        if self.void or self.stretches[0].void:
            return Accuracy("not checked", self.void or self.stretches[0].void)
        precision = self.judged_in(precision)
        accuracies = {
            number: self._of_stretch(number, course, precision, more)
            for number in self.stretches
            if number in course.stretches
        }
        for number, accuracy in accuracies.items():
            if accuracy.verdict == "wrong":
                return replace(accuracy, reason=f"{self._where(number)}{accuracy.reason}")
        if course.ends != self.baseline.ends:
            return self._of_another_length(course, precision)
        return self._together(accuracies, course is self.baseline)

    def distance(self, course: Course, precision: str) -> Accuracy:
        """How far off another model is, in the stretch that differs most; wrong if it is broken."""
        if self.void or self.stretches[0].void:
            return Accuracy("not checked", self.void or self.stretches[0].void)
        distances = {
            number: yardstick.distance(course.stretches[number])
            for number, yardstick in self.stretches.items()
            if number in course.stretches and not yardstick.void and self._is_model(number)
        }
        for number, accuracy in distances.items():
            if accuracy.verdict == "wrong":
                return replace(accuracy, reason=f"{self._where(number)}{accuracy.reason}")
        if course.ends != self.baseline.ends:
            return self._of_another_length(course, self.judged_in(precision))
        nothing = Accuracy("not checked", NOTHING_TO_COMPARE)
        return max(distances.values(), key=_weight, default=nothing)

    def _is_model(self, number: int) -> bool:
        """Whether models or gradients can be compared there, not what lies in objects only."""
        stretch = self.baseline.stretches[number]
        return stretch.role != LEFT and stretch.has_numbers()

    def _of_stretch(
        self,
        number: int,
        course: Course,
        precision: str,
        more: Callable[[], Sequence[Course]] | None,
    ) -> Accuracy:
        observation = course.stretches[number]
        yardstick, theirs = self.stretches[number], self.baseline.stretches[number]
        if yardstick.void:
            return Accuracy("not checked", yardstick.void)
        surer = None if more is None else partial(self._more, number, precision, more)
        before = [
            (course.stretches[index], self.baseline.stretches[index])
            for index in self.stretches
            if index < number and index in course.stretches
        ]
        accuracy = yardstick.judge(observation, precision, surer, before)
        earlier = [stretch for pair in before for stretch in pair]
        fault = self._besides(number, observation, precision, earlier)
        if fault and more is not None and precision not in self.further:
            self._more(number, precision, more)  # before a variant is accused
            fault = self._besides(number, observation, precision, earlier)
        if fault and accuracy.verdict != "wrong":
            return replace(accuracy, verdict="wrong", reason=fault)
        if accuracy.verdict != "wrong" and (
            words := self._other_words(number, observation, precision)
        ):
            return replace(accuracy, verdict="not checked", reason=words, doubtful=True)
        if accuracy.verdict == "wrong" and self._fits_by_chance(number, observation, precision):
            return Accuracy("not checked", BY_CHANCE)
        unknown = accuracy.verdict == "not checked" and not accuracy.doubtful
        if unknown and not theirs.has_numbers() and enough(theirs):
            return replace(accuracy, verdict="exact", reason="")
        # What lies in the user's objects may be another kind of thing in another precision.
        if (
            theirs.role == LEFT
            and accuracy.verdict == "wrong"
            and not self._fits(number, observation)
        ):
            return Accuracy("not checked", accuracy.reason)
        return accuracy

    def _besides(
        self, number: int, observation: Observation, precision: str, before: Sequence[Observation]
    ) -> str:
        """What is wrong beside its results and gradients."""
        yardstick, theirs = self.stretches[number], self.baseline.stretches[number]
        controls = [*self._controls(number, precision), yardstick.reference]
        return missed(observation, theirs, controls) or astray(
            observation, theirs, controls, yardstick.names, before
        )

    def _other_words(self, number: int, observation: Observation, precision: str) -> str:
        """Which words of the results are others, more than rounding explains."""
        theirs, controls = self.baseline.stretches[number], self._controls(number, precision)
        controls = [*controls, self.stretches[number].reference]
        fault = misspelt(observation, theirs, controls, precision)
        return f"other result: {fault}" if fault else ""

    def _fits_by_chance(self, number: int, observation: Observation, precision: str) -> bool:
        """Whether it gives others in number or shape, as rounding alone does: in a loop that ends
        once its values are close, say.
        """
        if self._fits(number, observation):
            return False
        return not all(self._fits(number, control) for control in self._controls(number, precision))

    def _fits(self, number: int, observation: Observation) -> bool:
        yardstick = self.stretches[number]
        return errors(observation, yardstick.reference, yardstick.dropped).fits

    def _more(
        self, number: int, precision: str, more: Callable[[], Sequence[Course]]
    ) -> list[Errors]:
        """How far further controls are off in a stretch; they are run once."""
        if precision not in self.further:
            self.further[precision] = more()
            self.controls[precision] = [*self.controls.get(precision, ()), *self.further[precision]]
        by_number = {
            index: self._off_in(index, self.further[precision])
            for index in self.stretches
            if not self.stretches[index].void
        }
        there = self.baseline.stretches
        return with_alike(number, by_number, there) or extrapolated(number, by_number, there)

    def _off_in(self, number: int, courses: Sequence[Course]) -> list[Errors]:
        yardstick = self.stretches[number]
        there = [course.stretches[number] for course in courses if number in course.stretches]
        evidence = [errors(stretch, yardstick.reference, yardstick.dropped) for stretch in there]
        return [control for control in evidence if control.fits]

    def _controls(self, number: int, precision: str) -> list[Observation]:
        courses = self.controls.get(precision, ())
        return [course.stretches[number] for course in courses if number in course.stretches]

    def _of_another_length(self, course: Course, precision: str) -> Accuracy:
        counts = [control.ends for control in self.controls.get(precision, ())]
        mine, theirs = course.count, self.baseline.count
        lengths = f"{mine} stretches between optimizer steps, the baseline's {theirs}"
        if any(ends[:1] != self.baseline.ends[:1] for ends in counts if ends):
            return Accuracy(
                "not checked", f"rounding alone decides how many steps it takes: {lengths}"
            )
        return Accuracy("wrong", f"another number of optimizer steps: {lengths}")

    def _together(self, accuracies: dict[int, Accuracy], is_baseline: bool) -> Accuracy:
        telling = {n: accuracy for n, accuracy in accuracies.items() if self._tells(n, accuracy)}
        if not telling:
            rest = [
                accuracy
                for accuracy in accuracies.values()
                if accuracy.reason != NOTHING_TO_COMPARE
            ]
            return (rest or list(accuracies.values()))[0]
        first = next(iter(telling))
        for number, accuracy in telling.items():
            blocks = number == first or accuracy.doubtful or self._is_work(number)
            if accuracy.verdict == "not checked" and blocks:
                where = self._where(number)
                only = number != first and not accuracy.doubtful
                why = f"only what comes before is checked: {where}" if only else where
                return replace(accuracy, reason=f"{why}{accuracy.reason}")
        checked = [accuracy for accuracy in telling.values() if accuracy.verdict != "not checked"]
        rounded = [accuracy for accuracy in checked if accuracy.verdict == "rounding"]
        chief = max(rounded or checked, key=_weight)
        if not is_baseline and len(checked) < len(telling):
            more = "what it returns can't be told from rounding, and is not checked"
            chief = replace(chief, reason="; ".join(filter(None, (chief.reason, more))))
        return chief

    def _tells(self, number: int, accuracy: Accuracy) -> bool:
        """Whether there is anything in the stretch that could have failed."""
        if accuracy.doubtful:
            return True
        if accuracy.verdict != "not checked":
            return (
                self.baseline.stretches[number].has_numbers()
                or accuracy.verdict == "rounding"
                or (bool(accuracy.verdict) and accuracy.output_error is not None)
            )
        return self._is_model(number)

    def _is_work(self, number: int) -> bool:
        """What the models do in it, not only what is returned at its end."""
        stretch = self.baseline.stretches[number]
        return bool(stretch.calls) or stretch.has_gradients()

    def _where(self, number: int) -> str:
        """In words; empty where it is the step's beginning."""
        step, taken = self.baseline.stretches[number].place
        after = "" if not taken else f"after {taken} optimizer step{'s' * (taken > 1)}"
        of_step = "" if not step else f"in step {step + 1}"
        words = " ".join(filter(None, (of_step, after)))
        return f"{words}: " if words else ""


def _weight(accuracy: Accuracy) -> float:
    """The more a stretch is off, the more it says of the variant."""
    return max(accuracy.output_error or 0.0, accuracy.gradient_error or 0.0)

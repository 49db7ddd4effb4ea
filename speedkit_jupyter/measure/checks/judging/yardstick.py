"""Whether a variant still computes the same: one isolated step each, against float64.

What is compared: what the models gave, the tensors on which backward ran (or what the step
returned), all gradients before the first optimizer step, and what that step did with them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from speedkit_jupyter.measure.checks.accuracy import Accuracy, Verdict
from speedkit_jupyter.measure.checks.comparing.buffers import misled
from speedkit_jupyter.measure.checks.comparing.deviation import LEAST_GRADIENT
from speedkit_jupyter.measure.checks.comparing.errors import Errors, errors
from speedkit_jupyter.measure.checks.comparing.labels import Names
from speedkit_jupyter.measure.checks.comparing.tolerance import UNDETERMINED, Tolerance
from speedkit_jupyter.measure.checks.comparing.updates import misstep, untrained
from speedkit_jupyter.measure.checks.observing.course import LEFT
from speedkit_jupyter.measure.checks.reference.rounding import unit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from speedkit_jupyter.measure.checks.observing.observation import Observation

# From here on it is said that a net amplifies rounding: so many roundings of the baseline's own.
AMPLIFIES = 64
# What is off by so many times what controls are is wrong, whatever more of them would say.
CLEARLY = 8.0
# In a net that amplifies rounding an activation that tips over moves single rows by so much more
# than any control that did not meet it.
TIPPED = 16.0

NOTHING_TO_COMPARE = (
    "no model was called, there was no backward pass and no result to compare: end the step with "
    "its result, or name it with --check"
)


@dataclass
class Yardstick:
    """What variants are judged by: the step in float64 (or the baseline's own, where that is not
    to be had), the baseline's, and the tolerance of each precision.

    `void` says why nothing can be judged, `dropped` which outputs are other ones in every run;
    `names` are the model's own; `surer` the precisions that have further controls.
    """

    reference: Observation
    baseline: Observation
    own: Errors
    tolerances: Mapping[str, Tolerance] = field(default_factory=dict)
    void: str = ""
    dropped: frozenset[int] = frozenset()
    names: Names = field(default_factory=Names)
    surer: set[str] = field(default_factory=set)

    def judge(
        self,
        observation: Observation,
        precision: str,
        more: Callable[[], Sequence[Errors]] | None = None,
        before: Sequence[tuple[Observation, Observation]] = (),
    ) -> Accuracy:
        """Exact as the baseline, rounding as its dtype brings, wrong, or not checked and why.

        `more` runs further controls before a variant is accused by a narrow margin: of a net that
        amplifies rounding, one may have been lucky. `before` are earlier stretches of the variant
        and of the baseline.
        """
        if self.void:
            return Accuracy("not checked", self.void)
        if not _finite(self.baseline):
            return Accuracy("not checked", "the step itself gives numbers that are not finite")
        deviations, tolerance = self._off(observation), self.tolerances[precision]
        verdict, reason = self._verdict(observation, deviations, tolerance, before)
        if verdict == "wrong" and (surer := self._surer(deviations, tolerance, more)):
            tolerance = surer
            verdict, reason = self._verdict(observation, deviations, tolerance, before)
        doubtful = verdict == "wrong" and self._may_be_the_net(deviations, tolerance)
        if verdict == "wrong" and not doubtful:
            of_settings = self.baseline.role == LEFT
            sure, why = self._verdict(observation, deviations, tolerance.sure(of_settings), before)
            doubtful, reason = sure != "wrong", why if sure == "wrong" else reason
        if doubtful:
            verdict, reason = "not checked", f"{reason}, which may be the net or the plan"
        doubtful = doubtful or reason.startswith("other result")
        if not deviations.fits:
            return Accuracy(verdict, reason)
        return Accuracy(
            verdict,
            reason,
            _number(deviations.output.distance),
            _number(deviations.gradient.distance),
            _number(deviations.cosine),
            _number(self.own.output.distance),
            _number(self.own.gradient.distance),
            _number(tolerance.output),
            _number(tolerance.gradient),
            doubtful,
        )

    def distance(self, observation: Observation) -> Accuracy:
        """How far off another model is, which may be any distance: wrong is what does not work."""
        deviations = self._off(observation)
        if fault := self._broken(observation, deviations) or untrained(
            observation, self.baseline, self.names
        ):
            return Accuracy("wrong", fault)
        losses = [
            deviation.distance
            for name, deviation in zip(deviations.names, deviations.numbers, strict=False)
            if name.startswith("loss")
        ]
        return Accuracy(
            "other model",
            output_error=_number(deviations.output.distance),
            gradient_error=_number(deviations.gradient.distance),
            gradient_cosine=_number(deviations.cosine),
            baseline_output_error=_number(self.own.output.distance),
            baseline_gradient_error=_number(self.own.gradient.distance),
            loss_error=_number(max(losses, default=None)),
        )

    def _off(self, observation: Observation) -> Errors:
        """From the reference; what are the baseline's own whole numbers is not off."""
        deviations = errors(observation, self.reference, self.dropped)
        if self.reference is self.baseline or not any(
            difference.count for difference in deviations.differing
        ):
            return deviations
        differing = errors(observation, self.baseline, self.dropped).differing
        if len(differing) != len(deviations.differing):
            return deviations
        pairs = zip(deviations.differing, differing, strict=True)
        return replace(deviations, differing=[mine if own.count else own for mine, own in pairs])

    def _verdict(
        self,
        observation: Observation,
        deviations: Errors,
        tolerance: Tolerance,
        before: Sequence[tuple[Observation, Observation]],
    ) -> tuple[Verdict, str]:
        if fault := self._broken(observation, deviations):
            return "wrong", fault
        if fault := tolerance.beyond(deviations, self.names):
            if not tolerance.beyond(replace(deviations, differing=[])):
                return "not checked", f"other result: {fault}"
            return "wrong", fault + self._amplified(tolerance)
        if observation is not self.baseline and (
            fault := self._left(observation, tolerance, before)
        ):
            return "wrong", fault
        if lack := self._evidence_lacks(deviations, tolerance):
            return "not checked", lack
        pairs = [(deviations.output, self.own.output), (deviations.gradient, self.own.gradient)]
        pairs += zip(deviations.numbers, self.own.numbers, strict=False)
        close = all(deviation.distance <= 2 * own.distance + 1e-6 for deviation, own in pairs)
        if close and not any(difference.count for difference in deviations.differing):
            return "exact", ""
        return "rounding", self._amplified(tolerance).removeprefix("; ")

    def _broken(self, observation: Observation, deviations: Errors) -> str:
        """What is wrong with it whatever it computes; empty where nothing is."""
        if not deviations.fits:
            return "output: others than the baseline's in number or shape"
        if not deviations.finite or _has_nan(observation) > _has_nan(self.reference):
            return "output or gradients: not finite"
        return ""

    def _surer(
        self,
        deviations: Errors,
        tolerance: Tolerance,
        more: Callable[[], Sequence[Errors]] | None,
    ) -> Tolerance | None:
        """With more controls, where these could acquit; None where they could not."""
        precision = tolerance.precision
        if more is None or precision in self.surer or not deviations.fits or not deviations.finite:
            return None
        if tolerance.wider(CLEARLY).beyond(deviations):
            return None
        self.surer.add(precision)
        surer = tolerance.surer(more())
        self.tolerances = {**self.tolerances, precision: surer}
        return surer

    def _may_be_the_net(self, deviations: Errors, tolerance: Tolerance) -> bool:
        """Whether gradients of a net that amplifies rounding are off narrowly: an activation that
        tips over in one step is more than any number of controls may meet. It does not win, and is
        not accused.
        """
        if not (deviations.fits and deviations.finite and self._amplified(tolerance)):
            return False
        narrowly = not tolerance.wider(TIPPED).beyond(deviations)
        in_gradients = tolerance.beyond(replace(deviations, numbers=[]))  # results come first
        return narrowly and bool(in_gradients) and in_gradients == tolerance.beyond(deviations)

    def _left(
        self,
        observation: Observation,
        tolerance: Tolerance,
        before: Sequence[tuple[Observation, Observation]],
    ) -> str:
        """What is wrong with the parameters and buffers that the step leaves behind."""
        lowered, noise = tolerance.precision != "fp32", tolerance.noise()
        reference = None if self.reference is self.baseline else self.reference
        return misstep(observation, self.baseline, self.names, before, reference) or misled(
            observation, self.baseline, self.names.buffers, noise, lowered
        )

    def _evidence_lacks(self, deviations: Errors, tolerance: Tolerance) -> str:
        """Why nothing of all that was compared could have failed; empty where something could."""
        if not (deviations.numbers or deviations.gradients or deviations.differing):
            return self._unknown() or NOTHING_TO_COMPARE
        if deviations.vanishing:
            return (
                f"no gradient is larger than {LEAST_GRADIENT:g}, which is noise: nothing can be "
                "told from it"
            )
        most = tolerance.undetermined()
        if most >= UNDETERMINED and deviations.numbers:
            return (
                f"rounding to {tolerance.precision} alone moves an output by {most:.2g}, so that "
                "nothing can be told from it"
            )
        whole = tolerance.enough_whole_numbers(deviations)
        if not (deviations.numbers or deviations.gradients or whole):
            return "the step gives too few whole numbers to tell rounding from errors"
        return ""

    def _unknown(self) -> str:
        """What was there and can't be compared; empty where nothing was."""
        results = [*(call.results for call in self.baseline.calls), self.baseline.outputs]
        names = dict.fromkeys(name for result in results for name in result.unknown)
        return f"it gives nothing that can be compared: {', '.join(names)}" if names else ""

    def _amplified(self, tolerance: Tolerance) -> str:
        """That it is the net, where it is."""
        times = max(tolerance.output, tolerance.gradient) / unit(tolerance.precision)
        if tolerance.precision == "fp32" or times <= AMPLIFIES:
            return ""
        return (
            f"; this net amplifies rounding {times:.0f} times: {tolerance.precision} alone moves "
            f"its output by {tolerance.output:.2g}, its gradients by {tolerance.gradient:.2g}"
        )


def _number(value: float | None) -> float | None:
    """None where it is not finite, which JSON has no word for."""
    return value if value is not None and math.isfinite(value) else None


def _finite(observation: Observation) -> bool:
    """Gradients all, and some numbers of each result: others may be masks."""
    made = (
        bool(gradient.isfinite().all())
        for gradient in observation.gradients
        if gradient is not None
    )
    return all(made) and all(
        bool(tensor.isfinite().any()) for tensor in _results(observation) if tensor.numel()
    )


def _has_nan(observation: Observation) -> bool:
    return any(bool(tensor.isnan().any()) for tensor in _results(observation))


def _results(observation: Observation) -> list[torch.Tensor]:
    return [
        *(tensor for call in observation.calls for tensor in call.results.numbers),
        *observation.outputs.numbers,
    ]

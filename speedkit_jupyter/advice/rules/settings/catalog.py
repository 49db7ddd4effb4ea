"""What the catalog's rules would turn on here, each where the step spends its time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from speedkit_jupyter.advice.gain import Gain, amdahl
from speedkit_jupyter.advice.opportunity import Opportunity
from speedkit_jupyter.advice.rules.base import Rule
from speedkit_jupyter.advice.situation import Situation
from speedkit_jupyter.optimizations.base.decision import Effect
from speedkit_jupyter.profiling.split import Part
from speedkit_jupyter.support.words import share
from speedkit_jupyter.tuning.candidates import Candidate

COMPUTING: tuple[Part, ...] = ("forward", "backward")
EVERYTHING: tuple[Part, ...] = ("forward", "backward", "optimizer", "rest")
# What an entry makes faster, and how many times at the least and the most where it was measured
# (docs/results.md; notebooks/06_catalog.ipynb).
WORTH: dict[str, tuple[tuple[Part, ...], float, float]] = {
    "precision": (COMPUTING, 1.1, 4.0),
    "tf32": (COMPUTING, 1.1, 5.0),
    "gemm": (COMPUTING, 1.0, 2.0),
    "channels_last": (COMPUTING, 0.97, 1.6),
    "fused_optimizer": (("optimizer",), 1.2, 8.0),
    "cudnn_benchmark": (COMPUTING, 1.0, 1.5),
    "device": (EVERYTHING, 1.5, 50.0),
    "threads": (COMPUTING, 1.1, 4.0),
}
LEAST = 0.05


class Catalog(Rule):
    """Entries that `auto` would turn on, and that are not on yet."""

    name: ClassVar[str] = "catalog"

    def find(self, seen: Situation) -> Iterator[Opportunity]:
        """Each once, for all models."""
        told = set(seen.in_force)
        if seen.learned is not None:  # measured: the rules have nothing to add
            return
        for plan in seen.plans:
            for decision in plan:
                if not decision.active or decision.name in told or decision.name not in WORTH:
                    continue
                parts, least, most = WORTH[decision.name]
                part = seen.share(*parts)
                if part < LEAST:
                    continue
                told.add(decision.name)
                word = Candidate({decision.name: decision.value}).name
                gain = amdahl(part, least, most)
                yield Opportunity(
                    self.name,
                    f"turn on {word}",
                    f"{' and '.join(parts)}: {share(part)} of the step; {decision.reason}",
                    Gain(gain.low, max(gain.high, gain.low)),
                    f"%speedkit apply --{decision.name.replace('_', '-')} {_word(decision.value)}",
                    _risk(decision.name),
                    variant=word,
                )


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _risk(name: str) -> str:
    from speedkit_jupyter.optimizations import named

    if named(name).effect is Effect.EXACT:
        return "none: the results are the same"
    return "rounding, which the comparison checks"

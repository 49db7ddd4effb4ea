"""A situation for rules: a step that really runs, with shares of its time that a test gives it."""

from __future__ import annotations

import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from speedkit_jupyter import Hardware
from speedkit_jupyter.advice.code import Code
from speedkit_jupyter.advice.opportunity import Opportunity, Subject
from speedkit_jupyter.advice.rules import RULES
from speedkit_jupyter.advice.situation import Situation
from speedkit_jupyter.advice.watched import watched
from speedkit_jupyter.measure.subject.from_function import step_of
from speedkit_jupyter.profiling.costs import Cost, Costs
from speedkit_jupyter.profiling.line_times import LineTimes, Spot
from speedkit_jupyter.profiling.module_calls import names_of
from speedkit_jupyter.profiling.profile import Profile
from speedkit_jupyter.profiling.split import Split
from speedkit_jupyter.support.lookup import is_a

Found = dict[str, Opportunity]


def spots(lines: Mapping[str, float], functions: Sequence[Any]) -> dict[Spot, float]:
    """Shares by a piece of the text of each line."""
    found = {}
    for text, share in lines.items():
        places = []
        for function in functions:
            source, first = inspect.getsourcelines(function)
            file = inspect.getsourcefile(function) or ""
            places += [Spot(file, first + at) for at, one in enumerate(source) if text in one]
        assert places, f"no line has {text!r}"
        found[places[0]] = share
    return found


class Situations:
    """Makes them."""

    def __init__(self) -> None:
        self.last: Situation | None = None

    def seen(
        self,
        step: Callable[[], object],
        shares: Mapping[str, float] | None = None,
        lines: Mapping[str, float] | None = None,
        more: Sequence[Any] = (),
        operators: Mapping[str, float] | None = None,
        modules: Mapping[str, float] | None = None,
        device: str = "cpu",
        hardware: str = "cpu",
        **changes: Any,
    ) -> Situation:
        """Of a step that is called once; `shares` are of the parts, `lines` by their text."""
        measured = step_of(step)
        subject = Subject(measured.models, measured.optimizers)
        what = watched(step, subject.parameters)
        split = Split()
        split.seconds |= {"rest": 1.0 - sum((shares or {}).values()), **(shares or {})}
        split.pieces = {(part, part): seconds for part, seconds in split.seconds.items()}
        split.stepped = Counter({0: what.steps}) if what.steps else Counter()
        inside = spots(lines or {}, [step, *more])
        own = {(spot, "rest"): share for spot, share in inside.items()}
        profile = Profile(
            splits=[split], lines=LineTimes(own, inside, inside), device=device,
            costs=_costs(operators or {}, modules or {}),
        )  # fmt: skip
        names, _ = names_of(measured.models, {})
        walked = measured.walk().found.values()
        given = {
            "profile": profile,
            "watched": what,
            "code": Code(what.ran),
            "hardware": Hardware.from_json(hardware),
            "device": torch.device(device),
            "models": measured.models,
            "optimizers": measured.optimizers,
            "loaders": [value for value in walked if is_a(value, DataLoader)],
            "names": names,
        }
        return Situation(**{**given, **changes})

    def found(self, rule: str, step: Callable[[], object], **given: Any) -> list[Opportunity]:
        """What one rule says of it."""
        one = next(one for one in RULES if one.name == rule)
        found = [each.allowed for each in one.find(self.seen(step, **given))]
        for each in found:
            assert each.gain.low <= each.gain.high <= _allowed(each.evidence) * 1.02, each
        return found


def _allowed(evidence: str) -> float:
    """The speed-up that the largest share named as one of the step allows."""
    named = re.findall(r"([\d.]+) % of (?:the step|it)\b", evidence)
    most = max((float(one) / 100 for one in named), default=1.0)
    return math.inf if most >= 1 else 1 / (1 - most)


def _costs(operators: Mapping[str, float], modules: Mapping[str, float]) -> Costs:
    def costs(shares: Mapping[str, float]) -> list[Cost]:
        return [
            Cost(name, "", share, share / 2, 10.0, 0, 0, None, "") for name, share in shares.items()
        ]

    return Costs(costs(modules), costs(operators))


@pytest.fixture
def situations() -> Situations:
    return Situations()

"""Make situations for advice rules: a step runs once, and a test sets the shares of its time."""

import itertools
import linecache
import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from steps_of_rules import namespace
from torch.utils.data import DataLoader

from speedkit_jupyter import Hardware
from speedkit_jupyter.extras.advise.advice import Opportunity, Subject
from speedkit_jupyter.extras.advise.rules import RULES
from speedkit_jupyter.extras.advise.situation import Situation, observed
from speedkit_jupyter.extras.profile.costs import Cost, Costs, names_of
from speedkit_jupyter.extras.profile.profile import LineTimes, Profile, Split
from speedkit_jupyter.step.step import step_of
from speedkit_jupyter.support.lookup import is_a
from speedkit_jupyter.support.source_lines import Spot

NUMBERS = itertools.count()


def written(code: str) -> Callable[[], object]:
    """Return the code's function `step`, or a function with this code; linecache has the lines."""
    code = textwrap.dedent(code)
    if "def step" not in code:
        code = "def step():\n" + textwrap.indent(code, "    ")
    file = f"<step {next(NUMBERS)}>"
    linecache.cache[file] = (len(code), None, code.splitlines(True), file)
    names = namespace()
    exec(compile(code, file, "exec"), names)
    return names["step"]


def seen(
    step: Callable[[], object] | str,
    shares: Mapping[str, float] | None = None,
    lines: Mapping[str, float] | None = None,
    operators: Mapping[str, float] | None = None,
    device: str = "cpu",
    hardware: str = "cpu",
    **changes: Any,
) -> Situation:
    """Call a step once; return its Situation. `lines` maps text in a line to the line's share."""
    step = written(step) if isinstance(step, str) else step
    measured = step_of(step)
    call = observed(step, Subject(measured.models, measured.optimizers).parameters)
    split = Split()
    parts = {"rest": 1.0 - sum((shares or {}).values()), **(shares or {})}
    split.pieces.update({(part, part): seconds for part, seconds in parts.items()})
    split.stepped = Counter({0: call.steps}) if call.steps else Counter()
    spots = {_spot(step.__code__.co_filename, text): share for text, share in (lines or {}).items()}
    profile = Profile(splits=[split], costs=Costs([], _costs(operators or {})), device=device)
    profile.lines = LineTimes({(spot, "rest"): share for spot, share in spots.items()}, spots)
    loaders = [one for one in measured.walk().found.values() if is_a(one, DataLoader)]
    given = {
        "profile": profile,
        "observed": call,
        "cores": Hardware.from_json(hardware).cpu.usable_cores,
        "device": torch.device(device),
        "subject": Subject(measured.models, measured.optimizers, loaders),
        "names": names_of(measured)[0],
    }
    return Situation(**{**given, **changes})


def found(rule: str, step: Callable[[], object] | str, **given: Any) -> list[Opportunity]:
    """Return the opportunities of one rule; assert that their evidence allows the gains."""
    said = [*RULES[rule](seen(step, **given))]
    for one in said:
        named = re.findall(r"([\d.]+) % of (?:the step|it)\b", one.evidence)
        most = max((float(share) / 100 for share in named), default=1.0)
        allowed = math.inf if most >= 1 else 1.02 / (1 - most)
        assert one.gain.low <= one.gain.high <= allowed, one
    return said


def _spot(file: str, text: str) -> Spot:
    numbers = [n for n, line in enumerate(linecache.getlines(file), 1) if text in line]
    assert numbers, f"no line has {text!r}"
    return Spot(file, numbers[0])


def _costs(shares: Mapping[str, float]) -> list[Cost]:
    return [Cost(name, "", share, share / 2, 10.0) for name, share in shares.items()]

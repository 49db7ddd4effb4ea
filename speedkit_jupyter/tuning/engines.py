"""What a search measures first: the engines of float32 products, and the attention kernels on the
calls of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.measure.checks.attention_kernels import Seen, measured
from speedkit_jupyter.measure.rounds import clock
from speedkit_jupyter.measure.rounds.budget import Budget
from speedkit_jupyter.measure.rounds.sampler import Progress
from speedkit_jupyter.measure.subject.step import Step
from speedkit_jupyter.optimizations import named
from speedkit_jupyter.optimizations.facts import attention as timings
from speedkit_jupyter.optimizations.facts.attention import Call, Measured
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.tuning import tasks
from speedkit_jupyter.tuning.outcome import Tuning

if TYPE_CHECKING:
    import torch

# The engines of float32 products are not measured for less than so many seconds of budget; that
# takes two seconds, and at most this share of it. What took less than this goes without saying.
ENGINES_S, ENGINES_SHARE, NOTICED_S = 12.0, 0.25, 0.5
# What the attention kernels may take of a search's budget, and without a search.
SHARE, SECONDS = 0.1, 6.0
# Values of `precision` that attention is lowered to, as torch calls them.
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def measure(
    tuning: Tuning, budget: Budget, calls: dict[Call, Seen], models: Sequence[torch.nn.Module]
) -> Iterator[Progress]:
    """Measure what the candidates depend on, and write it into the search's hardware and facts."""
    is_known = tuning.facts.device_type != "cpu" or tuning.hardware.cpu.gemm is not None
    if not (is_known or tuning.hardware.pinned or budget.seconds < ENGINES_S):
        yield Progress(budget.share, "measuring the engines of float32 products, once")
        _measure_products(tuning, budget)
    if not calls or "sdpa" in tuning.kept:
        return
    doing = "measuring the attention kernels on the calls of the step"
    rows, left_out = list[Measured](), list[Call]()
    yield Progress(budget.share, doing)
    for row in timed(calls, tuning.hardware, tuning.facts, SHARE * budget.seconds, left_out):
        rows.append(row)
        yield Progress(budget.share, doing)
    if left_out and not budget.is_a_look:
        number = len(set(left_out))
        kinds = f"{number} kind{'s' * (number > 1)} of calls"
        tuning.notes.append(f"Attention kernels: no time was left to measure {kinds}")
    keep(models, tuple(rows))
    tuning.facts = replace(tuning.facts, attention=tuple(rows))
    others = tuning.facts_of_others
    tuning.facts_of_others = tuple(replace(facts, attention=tuple(rows)) for facts in others)


def _measure_products(tuning: Tuning, budget: Budget) -> None:
    """Beside the budget, since it is done once for a machine."""
    begun_s = clock.now()
    tuning.hardware = tuning.hardware.with_gemm(ENGINES_SHARE * budget.seconds)
    took_s, rates = clock.now() - begun_s, tuning.hardware.cpu.gemm
    budget.exclude(took_s)
    if rates is not None and rates.failure:
        tuning.notes.append(f"gemm was not tried: {rates.failure}")
    elif took_s > NOTICED_S:  # it was not known already
        tuning.notes.append(
            f"It took {took_s:.1f} s more to measure the engines of float32 products, which is "
            "done once for this machine"
        )


def of_step(
    step: Step, hardware: Hardware, seconds: float = SECONDS, left_out: list[Call] | None = None
) -> tuple[Measured, ...]:
    """Return what each attention kernel takes, kept beside the step's models; runs the step, and
    undoes what it did.

    `left_out` gets the calls that take too long to be measured. Raises what the step raises.
    """
    __tracebackhide__ = True
    calls = tasks.look(step, hardware).attention
    facts = Facts.read(step.models[0], step.holders(step.models[0]))
    rows = tuple(timed(calls, hardware, facts, seconds, left_out))
    keep(step.models, rows)
    return rows


def timed(
    calls: dict[Call, Seen],
    hardware: Hardware,
    facts: Facts,
    seconds: float,
    left_out: list[Call] | None = None,
) -> Iterator[Measured]:
    """Time the calls as the step makes them, and as it would in what else a search tries: a lower
    precision, the other engine of float32 products.
    """
    lowered = [DTYPES[v] for v in named("precision").candidates(hardware, facts) if v in DTYPES]
    every = dict(calls)
    for dtype in lowered:
        every |= {replace(call, dtype=dtype): _in(dtype, seen) for call, seen in calls.items()
                  if call.dtype == "float32"}  # fmt: skip
    engines = ("", *map(str, named("gemm").candidates(hardware, facts)))
    yield from measured(every, seconds, engines, left_out)


def keep(models: Sequence[torch.nn.Module], rows: tuple[Measured, ...]) -> None:
    """Beside each of the models: which of them has called is not known."""
    for model in models:
        timings.keep(model, rows)


def _in(dtype: str, seen: Seen) -> Seen:
    import torch

    to = getattr(torch, dtype)
    query, key, value = (tensor.to(to) for tensor in seen.tensors)
    mask = seen.mask
    if mask is not None and mask.is_floating_point():
        mask = mask.to(to)
    return replace(seen, tensors=(query, key, value), mask=mask)

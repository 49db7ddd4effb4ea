"""Strategies of several processes against one, on the user's own step, in shuffled rounds.

Every rank runs the cell as it stands, with the same batch: the mean of the gradients is then that
of one process, so the loss after equally many steps has to be the same, within rounding.
"""

from __future__ import annotations

import ast
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from speedkit_jupyter.catalog.properties.sharding import dtensor
from speedkit_jupyter.extras.processes.launching import names_of
from speedkit_jupyter.machines.devices import synchronize
from speedkit_jupyter.plans.applying import prepare
from speedkit_jupyter.plans.config import SpeedConfig
from speedkit_jupyter.rounds.shuffled_rounds import BLOCK_S, ShuffledRounds, block_length
from speedkit_jupyter.rounds.statistics import Ratio, least_rounds, paired_ratio
from speedkit_jupyter.state.handlers.names import Names
from speedkit_jupyter.state.snapshot import Snapshot
from speedkit_jupyter.state.walk import Walk
from speedkit_jupyter.torchglue import torch_profiler

SINGLE, APART = "single", "apart"
WORDS = (SINGLE, "ddp", "fsdp2", "hybrid")
# What the profiler calls them: gloo's work on CPUs, NCCL's kernels on GPUs.
COLLECTIVES = ("gloo:", "ncclDevKernel", "ncclKernel")
# Losses of float32 that differ by less are equal: sums are taken in another order.
EQUAL = 1e-3


@dataclass(frozen=True)
class StrategyBlock:
    """A round's block of one strategy: the seconds of a step and the loss by rank."""

    strategy: str
    step_s: Sequence[float]  # of the ranks that ran
    loss: float | None
    memory_bytes: Sequence[int]  # parameters, gradients and optimizer state of each rank
    traced_s: float | None = None  # of a step, in which a collective runs, where it was traced


@dataclass(frozen=True)
class StrategyRow:
    """What a strategy is worth: throughput of all ranks beside one process, and what it costs."""

    strategy: str
    ranks: int  # that make a batch each, in one step
    efficiency: Ratio  # a step of one process ÷ a step of all; times `ranks`: throughput
    exposed: float  # share of a step for communication that computing does not hide
    overlapped: float  # share of a step in which it computes and communicates
    skew: float  # between the first rank to end and the last, as a share of the step
    memory_bytes: int
    loss: float | None
    is_equal: bool | None


def rows(
    blocks: Sequence[StrategyBlock], strategies: Sequence[str], ranks: int
) -> Iterator[StrategyRow]:
    """Yield a row for each strategy; `ranks` batches a step where all of them run."""
    timed = [one for one in blocks if one.traced_s is None]
    of = {name: [one for one in timed if one.strategy == name] for name in {*strategies, APART}}
    traced = {one.strategy: one for one in blocks if one.traced_s is not None}
    seconds = {name: [max(one.step_s) for one in every] for name, every in of.items()}
    apart_s, expected = median(seconds[APART]), of[SINGLE][-1].loss
    level = 0.05 / max(1, len(strategies) - 1)
    for name in strategies:
        each, loss = of[name], of[name][-1].loss
        is_single, is_equal = name == SINGLE, None
        exposed = 0.0 if is_single else max(0.0, 1 - apart_s / median(seconds[name]))
        share = 0.0 if is_single else (traced[name].traced_s or 0.0) / max(traced[name].step_s)
        if loss is not None and expected is not None:
            is_equal = math.isclose(loss, expected, rel_tol=EQUAL, abs_tol=EQUAL**2)
        yield StrategyRow(
            strategy=name,
            ranks=1 if is_single else ranks,
            efficiency=paired_ratio(seconds[SINGLE], seconds[name], level),
            exposed=exposed,
            overlapped=max(0.0, share - exposed),
            skew=median(1 - min(one.step_s) / max(one.step_s) for one in each),
            memory_bytes=max(max(one.memory_bytes) for one in each),
            loss=loss,
            is_equal=is_equal,
        )


# --- in the workers ---


def race(
    source: str,
    model: str,
    optimizers: Sequence[str],
    strategies: Sequence[str],
    budget_s: float,
) -> list[StrategyBlock]:
    """Run rounds of blocks on this rank until the budget is spent; all state is put back.

    `model` and `optimizers` are names of this process.
    """
    import torch.distributed as dist

    space = sys.modules["IPython"].get_ipython().user_ns
    step = _step(source, space)
    net, optims = space[model], [space[name] for name in optimizers]
    torch.manual_seed(0)  # the same on all ranks: each drops what one process drops
    before = Snapshot(Walk([Names(space, *names_of(source)), net, *optims]))
    names, blocks, until_s = (
        [*strategies, APART],
        list[StrategyBlock](),
        time.monotonic() + budget_s,
    )
    steps = 1
    try:
        rounds = ShuffledRounds(lambda: names)  # in the same order on all ranks
        for order in rounds:
            for name in order:
                before.restore()
                blocks.append(_block(name, step, net, optims, steps))
            if rounds.number == 1:  # it warms up, and tells how long the slowest takes
                slowest_s = max(max(block.step_s) for block in blocks)
                # Ranks leave a barrier up to a few milliseconds apart: a part of each block.
                steps = block_length(slowest_s, block_s=5 * BLOCK_S)
                blocks.clear()
            is_enough = rounds.number > least_rounds(len(strategies))
            over = [time.monotonic() > until_s and is_enough]
            dist.broadcast_object_list(over)
            if over[0]:
                break
        for name in strategies:  # last, since torch's profiler leaves its mark on a process
            before.restore()
            blocks.append(_block(name, step, net, optims, steps, traces=True))
    finally:
        before.restore()
    return blocks


def _step(source: str, space: dict[str, Any]) -> Callable[[], Any]:
    """Return the cell as a function; its value is that of a trailing expression, or `loss`."""
    tree = ast.parse(source)
    value = compile("None", "<cell>", "eval")
    if isinstance(last := tree.body[-1], ast.Expr):
        tree.body.pop()
        value = compile(ast.Expression(last.value), "<cell>", "eval")
    body = compile(tree, "<cell>", "exec")

    def step() -> Any:
        exec(body, space)
        result = eval(value, space)
        return space.get("loss") if result is None else result

    return step


def _block(
    name: str,
    step: Callable[[], Any],
    model: Any,
    optimizers: Sequence[Any],
    steps: int,
    traces: bool = False,
) -> StrategyBlock:
    import torch.distributed as dist

    runs = name != SINGLE or dist.get_rank() == 0
    loss, trace = None, None
    spread: AbstractContextManager[Any] = nullcontext()
    if name not in (SINGLE, APART):
        config = SpeedConfig.from_dict({"distributed": name}).alone()
        spread = prepare(model, config, list(optimizers)).in_force()
    with spread:
        if runs:
            step()
        dist.barrier()
        with torch_profiler.profiled() if traces else nullcontext() as trace:
            begun_s = time.perf_counter()
            for _ in range(steps if runs else 0):
                loss = step()
            synchronize(next(model.parameters()).device)
            seconds = (time.perf_counter() - begun_s) / steps
        used = _state_bytes(model, optimizers)
    number = float(loss) if getattr(loss, "numel", lambda: 1)() == 1 and loss is not None else None
    every: list[Any] = [None] * dist.get_world_size()
    events = [one for one in trace.events() if one.name.startswith(COLLECTIVES)] if trace else []
    collectives_s = torch_profiler.covered_s(events) / steps if trace else None
    dist.all_gather_object(every, (seconds, number, used, collectives_s) if runs else None)
    step_s, losses, memory, shared_s = zip(*filter(None, every), strict=True)
    return StrategyBlock(name, step_s, losses[0], memory, shared_s[step_s.index(max(step_s))])


def _state_bytes(model: Any, optimizers: Sequence[Any]) -> int:
    """Return what this rank holds of parameters, gradients and optimizer state."""
    held = [one for parameter in model.parameters() for one in (parameter, parameter.grad)]
    states = (state for optimizer in optimizers for state in optimizer.state.values())
    held += [one for state in states for one in state.values()]
    local = (one.to_local() if isinstance(one, dtensor()) else one for one in held)
    return sum(one.numel() * one.element_size() for one in local if isinstance(one, torch.Tensor))

"""Strategies of several processes against one, on the user's own step, in shuffled rounds.

Every rank runs the cell as it stands, with the same batch: the mean of the gradients is then that
of one process, so the loss after equally many steps has to be the same, within rounding.
"""

from __future__ import annotations

import ast
import copy
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from speedkit_jupyter.measure.results.statistics import Ratio, least_rounds, paired_ratio
from speedkit_jupyter.plans.applying import prepare
from speedkit_jupyter.plans.config import SpeedConfig
from speedkit_jupyter.processes import merging
from speedkit_jupyter.support.storage import size_in_memory

SINGLE, APART = "single", "apart"
VALUE = "_value_of_the_cell"
WORDS = (SINGLE, "ddp", "fsdp2", "hybrid")
# A block of the slowest strategy lasts so long; all make as many steps.
BLOCK_S = 0.05
# Losses of float32 that differ by less are equal: sums are taken in another order.
EQUAL = 1e-3


@dataclass(frozen=True)
class Block:
    """A round's block of one strategy: the seconds of a step and the loss by rank."""

    strategy: str
    step_s: Sequence[float]  # of the ranks that ran
    loss: float | None
    memory_bytes: Sequence[int]  # parameters, gradients and optimizer state of each rank


@dataclass(frozen=True)
class Row:
    """What a strategy is worth beside one process, and what it costs."""

    strategy: str
    ranks: int  # that make a batch each, in one step
    efficiency: Ratio  # a step of one process ÷ a step of all; times `ranks`: throughput
    waiting: float  # share of a step for communication that computing does not hide
    skew: float  # between the first rank to end and the last, as a share of the step
    memory_bytes: int
    loss: float | None
    is_equal: bool | None


def rows(blocks: Sequence[Block], strategies: Sequence[str], ranks: int) -> list[Row]:
    """Return a row for each strategy; `ranks` batches a step where all of them run."""
    of = {name: [one for one in blocks if one.strategy == name] for name in {*strategies, APART}}
    seconds = {name: [max(one.step_s) for one in every] for name, every in of.items()}
    apart_s, expected = statistics.median(seconds[APART]), of[SINGLE][-1].loss
    found = []
    for name in strategies:
        each, loss = of[name], of[name][-1].loss
        level = 0.05 / max(1, len(strategies) - 1)
        waiting = max(0.0, 1 - apart_s / statistics.median(seconds[name]))
        is_equal = None
        if loss is not None and expected is not None:
            is_equal = math.isclose(loss, expected, rel_tol=EQUAL, abs_tol=EQUAL**2)
        row = Row(
            strategy=name,
            ranks=1 if name == SINGLE else ranks,
            efficiency=paired_ratio(seconds[SINGLE], seconds[name], level),
            waiting=0.0 if name == SINGLE else waiting,
            skew=statistics.median(1 - min(one.step_s) / max(one.step_s) for one in each),
            memory_bytes=max(max(one.memory_bytes) for one in each),
            loss=loss,
            is_equal=is_equal,
        )
        found.append(row)
    return found


# --- in the workers ---


def race(
    source: str,
    model: str,
    optimizers: Sequence[str],
    strategies: Sequence[str],
    budget_s: float,
) -> list[Block]:
    """Run rounds of blocks on this rank until the budget is spent; all state is put back.

    `model` and `optimizers` are names of this process.
    """
    import torch.distributed as dist

    space = sys.modules["IPython"].get_ipython().user_ns
    step = _step(source, space)
    net, optims = space[model], [space[name] for name in optimizers]
    put_back = _saved([net, *optims])
    names, blocks, until_s = [*strategies, APART], list[Block](), time.monotonic() + budget_s
    steps = 1
    try:
        for number in range(10_000):
            shuffled = random.Random(number).sample(names, len(names))
            for name in shuffled:
                put_back()
                blocks.append(_block(name, step, net, optims, steps))
            if number == 0:  # it warms up, and tells how long the slowest takes
                slowest_s = max(max(block.step_s) for block in blocks)
                steps = max(1, int(BLOCK_S / slowest_s))
                blocks.clear()
            over = [time.monotonic() > until_s and number >= least_rounds(len(strategies))]
            dist.broadcast_object_list(over)
            if over[0]:
                break
    finally:
        put_back()
    return blocks


def _step(source: str, space: dict[str, Any]) -> Callable[[], Any]:
    """Return the cell as a function; its value is that of a trailing expression, or `loss`."""
    tree = ast.parse(source)
    if isinstance(last := tree.body[-1], ast.Expr):
        tree.body[-1:] = ast.parse(f"{VALUE} = {ast.unparse(last)}").body
    code = compile(tree, "<cell>", "exec")

    def step() -> Any:
        exec(code, space)
        value = space.pop(VALUE, None)
        return space.get("loss") if value is None else value

    return step


def _saved(stateful: Sequence[Any]) -> Callable[[], None]:
    """Return what puts the states of now back, and clears gradients."""
    kept = [copy.deepcopy(merging.state_of(one)) for one in stateful]

    def put_back() -> None:
        import torch

        for one, state in zip(stateful, kept, strict=True):
            merging.put_state(one, copy.deepcopy(state))
            if isinstance(one, torch.nn.Module):
                one.zero_grad()
        torch.manual_seed(0)

    return put_back


def _block(
    name: str, step: Callable[[], Any], model: Any, optimizers: Sequence[Any], steps: int
) -> Block:
    import torch
    import torch.distributed as dist

    runs, loss = name != SINGLE or dist.get_rank() == 0, None
    with _in_force(name, model, optimizers):
        if runs:
            step()
        dist.barrier()
        begun_s = time.perf_counter()
        for _ in range(steps if runs else 0):
            loss = step()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        seconds = (time.perf_counter() - begun_s) / steps
        held = [one for parameter in model.parameters() for one in (parameter, parameter.grad)]
        held += [
            one for each in optimizers for kept in each.state.values() for one in kept.values()
        ]
        used = sum(size_in_memory(one) for one in held if isinstance(one, torch.Tensor))
    number = float(loss) if loss is not None and getattr(loss, "numel", lambda: 1)() == 1 else None
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (seconds, number, used, runs))
    ran = [one for one in every if one[3]]
    return Block(name, [one[0] for one in ran], ran[0][1], [one[2] for one in ran])


@contextmanager
def _in_force(name: str, model: Any, optimizers: Sequence[Any]) -> Iterator[None]:
    if name in (SINGLE, APART):
        yield
        return
    config = SpeedConfig.from_dict({"distributed": name}).alone()
    with prepare(model, config, list(optimizers)).in_force():
        yield

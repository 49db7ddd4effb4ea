"""Compare multi-process strategies with a single process on the user's step.

Every rank runs the unchanged cell on the same batch. The mean of the gradients then equals the
gradient of one process, so losses after the same number of steps must agree within rounding.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from speedkit_jupyter.extras.processes.sharding import dtensor
from speedkit_jupyter.machines.devices import synchronize
from speedkit_jupyter.notebook.cell import Cell
from speedkit_jupyter.plans.applying import prepare
from speedkit_jupyter.plans.config import SpeedConfig
from speedkit_jupyter.rounds.shuffled_rounds import BLOCK_S, ShuffledRounds, block_length
from speedkit_jupyter.rounds.statistics import ERROR, Ratio, least_rounds, paired_ratio
from speedkit_jupyter.state.snapshot import Snapshot, generators_kept
from speedkit_jupyter.state.walk import Walk
from speedkit_jupyter.step.memory import size, state_tensors

SINGLE = "single"
WORDS = (SINGLE, "ddp", "fsdp2")
# Losses count as equal up to this relative difference: float32 sums depend on their order.
EQUAL = 1e-3
# Seconds per step of the slowest rank, rank 0's loss, and the largest state of a rank in bytes.
StrategyBlock = tuple[float, float | None, int]


@dataclass(frozen=True)
class StrategyRow:
    """A strategy's throughput compared with one process, its memory for state, and its loss."""

    strategy: str
    ranks: int  # processes, and batches per step
    efficiency: Ratio  # one process's step time ÷ all processes'; the speedup is `ranks` times that
    memory_bytes: int
    loss: float | None
    is_equal: bool | None  # whether the loss equals one process's loss; None if missing


def rows(blocks: Mapping[str, Sequence[StrategyBlock]], ranks: int) -> Iterator[StrategyRow]:
    """Yield a row for each strategy; `single` runs on one rank, other strategies on all `ranks`."""
    seconds = {name: [step_s for step_s, _, _ in every] for name, every in blocks.items()}
    expected = blocks[SINGLE][-1][1]
    for name, every in blocks.items():
        loss, is_equal = every[-1][1], None
        if loss is not None and expected is not None:
            is_equal = math.isclose(loss, expected, rel_tol=EQUAL, abs_tol=EQUAL**2)
        number, used_bytes = 1 if name == SINGLE else ranks, max(used for _, _, used in every)
        efficiency = paired_ratio(seconds[SINGLE], seconds[name], ERROR / (len(blocks) - 1))
        yield StrategyRow(name, number, efficiency, used_bytes, loss, is_equal)


# --- in the workers ---


@generators_kept()
def race(
    source: str, model: Any, optimizers: Sequence[Any], strategies: Sequence[str], budget_s: float
) -> list[StrategyRow]:
    """Time strategies for at least `budget_s`, restore all state, and return a row for each."""
    shell = sys.modules["IPython"].get_ipython()
    cell = Cell(shell, source)

    def step() -> Any:
        value = cell.run()
        return shell.user_ns.get("loss") if value is None else value

    torch.manual_seed(0)  # the same seed on all ranks: dropout masks as in one process
    before = Snapshot(Walk([cell.names(), model, *optimizers]))
    blocks: dict[str, list[StrategyBlock]] = {name: [] for name in strategies}
    steps, until_s = 1, time.monotonic() + budget_s
    try:
        rounds = ShuffledRounds([*blocks])  # the same order on all ranks
        for order in rounds:
            for name in order:
                before.restore()
                blocks[name].append(_block(name, step, model, optimizers, steps))
            if rounds.number == 1:  # the warm-up, which gives the slowest strategy's step time
                slowest_s = max(every.pop()[0] for every in blocks.values())
                # Blocks are long, because ranks leave the barrier up to a few milliseconds apart.
                steps = block_length(slowest_s, block_s=5 * BLOCK_S)
            is_enough = rounds.number > least_rounds(len(strategies))
            over = [time.monotonic() > until_s and is_enough]
            torch.distributed.broadcast_object_list(over)
            if over[0]:
                break
    finally:
        before.restore()
    return [*rows(blocks, torch.distributed.get_world_size())]


def _block(
    name: str, step: Callable[[], Any], model: Any, optimizers: Sequence[Any], steps: int
) -> StrategyBlock:
    import torch.distributed as dist

    runs, loss = name != SINGLE or dist.get_rank() == 0, None
    spread: AbstractContextManager[Any] = nullcontext()
    if name != SINGLE:
        config = SpeedConfig.from_dict({"distributed": name}).alone()
        spread = prepare(model, config, list(optimizers)).in_force()
    with spread:
        if runs:
            step()
        dist.barrier()
        begun_s = time.perf_counter()
        for _ in range(steps if runs else 0):
            loss = step()
        synchronize(next(iter(model.parameters())).device)
        seconds = (time.perf_counter() - begun_s) / steps
        used = _state_bytes(model, optimizers)
    number = float(loss) if loss is not None and getattr(loss, "numel", lambda: 1)() == 1 else None
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (seconds, number, used))
    ran = every[:1] if name == SINGLE else every
    return max(one[0] for one in ran), ran[0][1], max(one[2] for one in ran)


def _state_bytes(model: Any, optimizers: Sequence[Any]) -> int:
    """Return this rank's bytes of parameters, buffers, gradients and optimizer state."""
    held: list[Any] = state_tensors([model], optimizers)
    return size([one.to_local() if isinstance(one, dtensor()) else one for one in held])

"""Compare the shares of a step's parts by `profile()` with the shares by a stopwatch.

Four of six loops are bound by the loader, by synchronizations, by Python or by computing. One reads
every row with `.item()`, and one rolls out a policy. Each loop is profiled unchanged. Before and
after that, it runs with a stopwatch around every part.
Prints each part's share by both methods, and a profiled call's time over a plain call's time.
Exits 1 if a share is off by more than 5 percentage points, or the parts do not sum to the step.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from _nets import mlp
from _program import machine, plain_parser
from _slow_steps import Pictures
from _tables import exit_code, markdown
from _timing import DEVICE, wait
from _workloads import Transformer, resnet
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from speedkit_jupyter import profile
from speedkit_jupyter.extras.profile.profile import PARTS

OFF = 0.05
HAND = ("data", "host to device", "forward", "backward", "optimizer", "synchronizations")
# The number of calls that are timed by hand.
CALLS = 30
ROWS = torch.randn(256, 10, generator=torch.Generator().manual_seed(0))

Stopwatch = Callable[[str], Any]


@dataclass
class Loop:
    """`run(part)` makes some steps; `part("forward")` surrounds a part that is timed by hand.

    `waits` is False if there are too many waits to time each by hand; they count as the rest.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    run: Callable[[Stopwatch], None]
    waits: bool = True


def _training(
    model: nn.Module, batches: Iterable[Any], device: str,
    after: Callable[..., Any] = lambda part, loss: None, waits: bool = True,
) -> Loop:  # fmt: skip
    optimizer = torch.optim.AdamW(model.to(device).parameters())

    def run(part: Stopwatch) -> None:
        with part("data"):
            draws = iter(batches)
        while True:
            with part("data"):
                batch = next(draws, None)
            if batch is None:
                return
            with part("host to device"):
                x, y = (tensor.to(device) for tensor in batch)
            with part("forward"):
                loss = functional.cross_entropy(model(x).flatten(0, -2), y.flatten())
            _learn(part, optimizer, loss)
            after(part, loss)

    return Loop(model, optimizer, run, waits)


def _learn(part: Stopwatch, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    with part("backward"):
        loss.backward()
    with part("optimizer"):
        optimizer.step()
        optimizer.zero_grad()


def _in_python(part: Stopwatch, loss: torch.Tensor) -> None:
    total = 0
    for number in range(60_000):
        total += number % 7


def _waiting(part: Stopwatch, loss: torch.Tensor) -> None:
    for _ in range(50):
        with part("synchronizations"):
            loss.item()


def _row_by_row(part: Stopwatch, loss: torch.Tensor) -> None:
    hits = 0
    for row in ROWS.to(loss.device):
        hits += row.argmax().item() == row.argmin().item()


def _rolled_out(device: str) -> Loop:
    """Return a loop of forty moves of a policy, which then learns from them."""
    policy = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)).to(device)
    optimizer = torch.optim.Adam(policy.parameters())
    moves = np.random.default_rng(0).standard_normal((4, 8)) / 4

    def run(part: Stopwatch) -> None:
        state, seen, chosen = np.zeros(8), [], []
        for _ in range(40):
            x = torch.as_tensor(state, dtype=torch.float32).to(device)
            with torch.no_grad(), part("forward"):
                scores = policy(x)
            action = int(scores.argmax())
            state = np.tanh(state + moves[action])
            seen.append(x)
            chosen.append(action)
        x, y = torch.stack(seen), torch.tensor(chosen, device=device)
        with part("forward"):
            loss = functional.cross_entropy(policy(x), y)
        _learn(part, optimizer, loss)

    return Loop(policy, optimizer, run, waits=False)


def loops(device: str) -> Iterator[tuple[str, Loop]]:
    """Yield the name of each loop and the loop, made with fixed random numbers."""
    torch.manual_seed(0)
    slow, few = (DataLoader(Pictures(64, smoothed), 16) for smoothed in (4, 0))
    text = [(torch.randint(500, (8, 64)), torch.randint(500, (8, 64))) for _ in range(4)]
    yield "loader-bound", _training(resnet(8), slow, device)
    yield "compute-bound", _training(Transformer(), text, device)
    yield "Python-bound", _training(resnet(8), few, device, _in_python)
    yield "sync-bound", _training(resnet(8), few, device, _waiting)
    rows = [(torch.randn(256, 32), torch.randint(10, (256,)))]
    yield "row by row", _training(mlp(32, 64, 10), rows, device, _row_by_row, waits=False)
    yield "rolled out", _rolled_out(device)


def not_timed(part: str) -> Any:
    """Stand in for a stopwatch, in the plain loop."""
    return nullcontext()


def by_hand(loop: Loop) -> list[dict[str, float]]:
    loop.run(not_timed)
    found = []
    for _ in range(CALLS):
        spent_s, begun_s = dict.fromkeys(HAND, 0.0), time.perf_counter()

        @contextmanager
        def watch(part: str, spent_s: dict[str, float] = spent_s) -> Iterator[None]:
            part_begun_s = time.perf_counter()
            try:
                yield
            finally:
                spent_s[part] += time.perf_counter() - part_begun_s

        loop.run(watch)
        with watch("synchronizations"):
            wait()
        whole_s = time.perf_counter() - begun_s
        shares = {part: seconds / whole_s for part, seconds in spent_s.items()}
        found.append(shares | {"rest": 1 - sum(shares.values())})
    return found


def main() -> int:
    options = plain_parser(__doc__, budget=10.0, device=DEVICE).parse_args()
    lines, problems = [], []
    for name, loop in loops(options.device):
        before = by_hand(loop)
        found = profile(
            partial(loop.run, not_timed),
            model=loop.model, optimizer=loop.optimizer, budget_s=options.budget,
        )  # fmt: skip
        calls = [*before, *by_hand(loop)]
        # The median, because other programs slow down some of the calls.
        hand = {part: median(call[part] for call in calls) for part in calls[0]}
        shares = {part: found.share(part) for part in PARTS}
        cells = [f"{share:.1%} ({hand.get(part, 0):.1%})" for part, share in shares.items()]
        lines.append([name, *cells, f"{found.cost:.3f}" if found.cost else "–"])
        if not loop.waits:
            shares["rest"] += shares.pop("synchronizations")
        problems += [
            f"{name}: {part} is {share:.1%}, by hand {hand.get(part, 0):.1%}"
            for part, share in shares.items()
            if abs(share - hand.get(part, 0)) > OFF
        ]
        if abs(sum(found.seconds(part) for part in PARTS) / found.step_s - 1) > 0.03:
            problems.append(f"{name}: the parts do not sum to the step")
    print(f"{machine(options.device)}\n\n{markdown(['loop', *PARTS, 'cost'], *lines)}\n")
    print("By profile(), in brackets by hand; of the last two, waiting is the rest by hand.")
    return exit_code(problems)


if __name__ == "__main__":
    sys.exit(main())

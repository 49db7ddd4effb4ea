"""How often a benchmark tells the truth: ours, and three usual ways, side by side.

One small recurrent network over a sequence of 100 is compared with itself (A/A), and with itself
over sequences that are 1, 2, 5, 10 and 20 % longer, by four protocols in one run: `benchmark()`;
two `%timeit` averages; two medians of torch.utils.benchmark's Timer (which its Compare
prints); two plain loops. A protocol "cries" where it says that the second is faster or slower; for
the three that give a number and no verdict that is a difference of more than 1 %, the band in which
`benchmark()` says "same".

    python tests/benchmarks/truth.py [--load quiet|busy] [--cycles 25] [--file truth.jsonl]

A cycle takes about a minute; a stopped run goes on. `busy` keeps both cores busy in bursts with
other processes. Exits 1 where a promise is broken.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median

import torch
import torch.utils.benchmark
from _load import bursts
from _program import Row, append, exit_code, machine, parser_of, read
from scipy import stats
from torch import nn

from speedkit_jupyter import benchmark

LENGTH = 100  # of the sequence, so that one more is 1 %
PLANTED = (0, 1, 2, 5, 10, 20)
PLANTED_FOR_OTHERS = (0, 2, 5)
# Budgets in seconds: 2 for A/A, the default for the rest.
BUDGETS = {0: 2.0}
DEFAULT_BUDGET_S = 10.0
BAND = 0.01
OTHERS = {"timeit": "two %timeit", "timer": "two Timers", "loops": "two loops"}


def main() -> int:
    """Run the program."""
    parser = parser_of(__doc__, "truth.jsonl")
    parser.add_argument("--load", choices=("quiet", "busy"), default="quiet")
    parser.add_argument("--cycles", type=int, default=25)
    options = parser.parse_args()

    def done() -> list[list[Row]]:
        return [row["found"] for row in read(options.file) if row["load"] == options.load]

    torch.manual_seed(0)
    torch.set_num_threads(1)  # two threads that wait for one another would measure the scheduler
    if not options.table:
        with bursts() if options.load == "busy" else nullcontext():
            for number in range(len(done()), options.cycles):
                append(options.file, {"load": options.load, "found": cycle(number)})
                print(f"cycle {number + 1} of {options.cycles}", file=sys.stderr, flush=True)
    print(f"{machine()}, {options.load}, {len(done())} cycles")
    found = [one for cycle in done() for one in cycle]
    print(table(found))
    return exit_code(broken(found))


# One cycle: every protocol on every pair, in an order of its own.


def cycle(number: int) -> list[Row]:
    """Run A/A eight times by `benchmark()`, and 2 % and 5 %, which have promises, twice.

    The other protocols run too in every fourth cycle.
    """
    jobs = [("speedbench", planted) for planted in (*PLANTED, *[0] * 7, 2, 5)]
    if number % 4 == 0:
        jobs += [(protocol, planted) for planted in PLANTED_FOR_OTHERS for protocol in OTHERS]
    random.Random(number).shuffle(jobs)
    return [{"protocol": p, "planted": planted, **run(p, planted)} for p, planted in jobs]


def run(protocol: str, planted: int) -> Row:
    """Return the verdict of a protocol on a sequence of LENGTH against one of LENGTH + planted."""
    begun_s = time.perf_counter()
    if protocol == "speedbench":
        said = speedbench(planted)
    else:
        model, x = Recurrent(), torch.rand(4, 32)
        seconds = {"timeit": timeit, "timer": timer, "loops": loops}[protocol]
        ratio = seconds(lambda: model(x, LENGTH)) / seconds(lambda: model(x, LENGTH + planted))
        word = "faster" if ratio > 1 + BAND else "slower" if ratio < 1 - BAND else "same"
        said = {"word": word, "ratio": ratio}
    return {**said, "seconds": time.perf_counter() - begun_s}


class Recurrent(nn.Module):
    """One layer, as often as the sequence is long: (N, 32) to (N, 32)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, length: int) -> torch.Tensor:
        """Make `length` calls of the layer, without gradients."""
        with torch.no_grad():
            for _ in range(length):
                x = nn.functional.linear(x, self.layer.weight, self.layer.bias).tanh_()
        return x


def speedbench(planted: int) -> Row:
    """Compare two plans that change nothing here; under the second the sequence is longer."""
    model, x = Recurrent(), torch.rand(4, 32)

    def step(ctx) -> None:
        model(x, LENGTH + (planted if ctx.plan["sdpa"].active else 0))

    budget = BUDGETS.get(planted, DEFAULT_BUDGET_S)
    found = benchmark(step, "baseline,sdpa:math", model=model, budget_s=budget)
    record = found.records[1]
    ratio = found.ratio(record)
    return {
        "word": found.verdict(record),
        "ratio": ratio.median,
        "low": ratio.low,
        "high": ratio.high,
        "pairs": ratio.pairs,
        "rounds_s": ratio.pairs * (found.round_s or 0.0),
    }


def timeit(step: Callable[[], None]) -> float:
    """Return the average that `%timeit` prints."""
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    shell.user_ns["step"] = step
    return shell.run_line_magic("timeit", "-o -q step()").average


def timer(step: Callable[[], None]) -> float:
    """Return the median of torch's Timer over its default 0.2 s."""
    found = torch.utils.benchmark.Timer("step()", globals={"step": step}).blocked_autorange()
    return found.median


def loops(step: Callable[[], None]) -> float:
    """Return the mean of a plain loop of 100 steps after 10 for warming up."""
    for _ in range(10):
        step()
    start = time.perf_counter()
    for _ in range(100):
        step()
    return (time.perf_counter() - start) / 100


# The table, and the promises.


def table(found: list[Row]) -> str:
    """Return a row for each protocol and planted slow-down, with 95 % binomial intervals."""
    head = (
        f"{'protocol':14}{'planted':>8}{'runs':>6}  {'cried faster':24}{'cried slower':24}"
        f"{'off by > 5 %':>13}{'pairs':>7}{'rounds':>9}{'in all':>9}"
    )
    lines = [head]
    for protocol, name in {"speedbench": "%%speedbench", **OTHERS}.items():
        for planted in PLANTED:
            some = [
                one for one in found if (one["protocol"], one["planted"]) == (protocol, planted)
            ]
            if some:
                lines.append(f"{name:14}{planted:>6} %{len(some):>6}  {_cells(planted, some)}")
    return "\n".join(lines)


def _cells(planted: int, found: list[Row]) -> str:
    true = LENGTH / (LENGTH + planted)
    off = sum(abs(one["ratio"] / true - 1) > 0.05 for one in found)
    pairs, rounds_s, seconds = (
        median(one.get(key, 0.0) for one in found) for key in ("pairs", "rounds_s", "seconds")
    )
    return (
        f"{_share(found, 'faster'):24}{_share(found, 'slower'):24}{off / len(found):>13.1%}"
        f"{pairs:>7.0f}{rounds_s:>8.1f}s{seconds:>8.1f}s"
    )


def _share(found: list[Row], word: str) -> str:
    """Return `3.0 % [0.6, 8.5]`, after Clopper and Pearson."""
    count = sum(one["word"] == word for one in found)
    interval = stats.binomtest(count, len(found)).proportion_ci()
    return f"{count / len(found):.1%} [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


# Which words about which planted slow-downs break a promise where more than this share say them.
PROMISES = {
    "A/A cries": ((0,), ("faster", "slower"), 0.05),
    "a wrong sign": (PLANTED[1:], ("faster",), 0.005),
    "2 % is missed": ((2,), ("faster", "same", "too noisy"), 0.05),
    "5 % is missed": ((5,), ("faster", "same", "too noisy"), 0.01),
}


def broken(found: list[Row]) -> list[str]:
    """Return the promises that the runs rule out: they lie outside of the binomial interval."""
    problems = []
    for name, (planted, words, most) in PROMISES.items():
        said = [
            one["word"] in words
            for one in found
            if one["protocol"] == "speedbench" and one["planted"] in planted
        ]
        if said and stats.binomtest(sum(said), len(said)).proportion_ci().low > most:
            problems.append(f"{name} in {sum(said)} of {len(said)} runs, promised {most:.1%}")
    return problems


if __name__ == "__main__":
    sys.exit(main())

"""Measure how often a benchmark tells the truth: `benchmark()` and three usual ways, side by side.

One small recurrent network over a sequence of 100 is compared with itself (A/A), and with itself
over longer sequences, by 1, 2, 5, 10 and 20 %. The protocols are `benchmark()`, two averages of
`%timeit`, two medians of torch.utils.benchmark's Timer, and two plain loops. A protocol "cries" if
it calls the second network faster or slower. The last three protocols give only a number. They cry
at a difference of more than 1 %, because `benchmark()` says "same" within 1 %.
A cycle takes about a minute; a stopped run goes on. `--load busy` runs two other processes in
bursts. Exits 1 if `benchmark()` breaks one of PROMISES.
"""

import random
import sys
from collections.abc import Callable
from statistics import median

import torch
import torch.utils.benchmark
from _load import is_above, repeated, share
from _program import Row, machine, parser_of
from _tables import exit_code, markdown
from _timing import timed
from torch import nn

from speedkit_jupyter import benchmark

LENGTH = 100  # of the sequence, so one more element is 1 %
PLANTED = (0, 1, 2, 5, 10, 20)
PLANTED_FOR_OTHERS = (0, 2, 5)
# Budgets in seconds: 2 for A/A, the default for the rest.
BUDGETS = {0: 2.0}
DEFAULT_BUDGET_S = 10.0
BAND = 0.01


def main() -> int:
    parser = parser_of(__doc__, "truth.jsonl", cycles=25)
    parser.add_argument("--load", choices=("quiet", "busy"), default="quiet")
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = repeated(options, options.cycles, cycle)
    print(f"{machine()}, {options.load}, {len(rows)} cycles")
    found = [one for row in rows for one in row["found"]]
    print(table(found))
    return exit_code(broken(found))


# One cycle: protocols and planted slow-downs in shuffled order.


def cycle(number: int) -> Row:
    """Run `benchmark()` once for each slow-down, but twice for 2 and 5 %, and eight times for A/A.

    The other protocols run only in every fourth cycle.
    """
    jobs = [("speedbench", planted) for planted in (*PLANTED, *[0] * 7, 2, 5)]
    if number % 4 == 0:
        jobs += [(protocol, planted) for planted in PLANTED_FOR_OTHERS for protocol in OTHERS]
    random.Random(number).shuffle(jobs)
    print(f"cycle {number + 1}", file=sys.stderr, flush=True)
    found = [{"protocol": name, "planted": planted, **run(name, planted)} for name, planted in jobs]
    return {"found": found}


def run(protocol: str, planted: int) -> Row:
    """Return the verdict of a protocol on a sequence of LENGTH against one of LENGTH + planted."""
    took_s, said = timed(lambda: speedbench(planted) if protocol == "speedbench" else by_number(
        OTHERS[protocol], planted))  # fmt: skip
    return {**said, "seconds": took_s}


def by_number(seconds: Callable[[Callable[[], None]], float], planted: int) -> Row:
    model, x = Recurrent(), torch.rand(4, 32)
    ratio = seconds(lambda: model(x, LENGTH)) / seconds(lambda: model(x, LENGTH + planted))
    word = "faster" if ratio > 1 + BAND else "slower" if ratio < 1 - BAND else "same"
    return {"word": word, "ratio": ratio}


class Recurrent(nn.Module):
    """One layer that is called once for each element of a sequence: (N, 32) to (N, 32)."""

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
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    shell.user_ns["step"] = step
    return shell.run_line_magic("timeit", "-o -q step()").average


def timer(step: Callable[[], None]) -> float:
    """Return the median of torch's Timer over its default 0.2 s."""
    found = torch.utils.benchmark.Timer("step()", globals={"step": step}).blocked_autorange()
    return found.median


def loops(step: Callable[[], None]) -> float:
    """Return the mean seconds of 100 steps in a plain loop, after 10 steps for warming up."""
    for _ in range(10):
        step()
    return timed(lambda: [step() for _ in range(100)])[0] / 100


OTHERS = {"timeit": timeit, "timer": timer, "loops": loops}


# The table, and the promises.


HEAD = ("protocol", "planted", "runs", "cried faster", "cried slower", "off by > 5 %", "pairs",
        "rounds", "in all")  # fmt: skip


def table(found: list[Row]) -> str:
    """Return a row for each protocol and planted slow-down, with 95 % binomial intervals."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for protocol in ("speedbench", *OTHERS):
        for planted in PLANTED:
            groups[protocol, planted] = [
                one for one in found if (one["protocol"], one["planted"]) == (protocol, planted)
            ]
    return markdown(HEAD, *(_cells(*key, some) for key, some in groups.items() if some))


def _cells(protocol: str, planted: int, found: list[Row]) -> list[str]:
    off = [abs(one["ratio"] * (LENGTH + planted) / LENGTH - 1) > 0.05 for one in found]
    cried = [share([one["word"] == word for one in found]) for word in ("faster", "slower")]
    pairs, rounds_s, all_s = (
        median(one.get(key, 0.0) for one in found) for key in ("pairs", "rounds_s", "seconds")
    )
    return [protocol, f"{planted} %", str(len(found)), *cried, f"{sum(off) / len(off):.1%}",
            f"{pairs:.0f}", f"{rounds_s:.1f} s", f"{all_s:.1f} s"]  # fmt: skip


# Each promise has planted slow-downs, wrong words, and the share of runs that may say the words.
PROMISES = {
    "A/A cries": ((0,), ("faster", "slower"), 0.05),
    "a wrong sign": (PLANTED[1:], ("faster",), 0.005),
    "2 % is missed": ((2,), ("faster", "same", "too noisy"), 0.05),
    "5 % is missed": ((5,), ("faster", "same", "too noisy"), 0.01),
}


def broken(found: list[Row]) -> list[str]:
    """Return promises whose binomial interval is entirely above the promised share."""
    problems = []
    for name, (planted, words, most) in PROMISES.items():
        ours = (one for one in found if one["protocol"] == "speedbench")
        said = [one["word"] in words for one in ours if one["planted"] in planted]
        if is_above(said, most):
            problems.append(f"{name} in {sum(said)} of {len(said)} runs, promised {most:.1%}")
    return problems


if __name__ == "__main__":
    sys.exit(main())

"""Test whether the accuracy check tells wrong plans from right ones.

A *planted* variant computes something wrong. Its verdict must be "wrong" or "not checked", so that
it can't win. *Honest* cases are nets and loops of every family under right plans, which must not be
called wrong.
`--only` takes the cases whose name contains one of the words. Only the check runs, without timing.
Takes about ten minutes. Exits 1 if a wrong variant could win, or a right one is called wrong.
"""

import sys
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from _honest import HONEST
from _nets import Case
from _planted import PLANTED
from _program import Row, append, machine, plain_parser
from _tables import exit_code

from speedkit_jupyter.rounds.benchmark import Benchmark
from speedkit_jupyter.rounds.comparison import Comparison, Record
from speedkit_jupyter.rounds.sampler import Policy
from speedkit_jupyter.step.step import step_of
from speedkit_jupyter.step.variants import variant

# The check ends long before this time, even on a busy machine.
ENOUGH_S = 120.0


def main() -> int:
    parser = plain_parser(__doc__)
    parser.add_argument("--part", choices=("planted", "honest"))
    parser.add_argument("--file", type=Path)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the nets are small
    warnings.simplefilter("ignore")
    rows: list[Row] = []
    for case in (*PLANTED, *HONEST):
        part = "planted" if case.is_planted else "honest"
        is_chosen = any(word in str(case) for word in options.only)
        for row in judged(case) if is_chosen and options.part in (None, part) else ():
            rows.append({"part": part, **row})
            print(f"{part:8} {row['name']:52} {row['verdict']:12} {row['reason']}", flush=True)
            if options.file:
                append(options.file, rows[-1])
    for part in dict.fromkeys(row["part"] for row in rows):
        counts = Counter(row["verdict"] for row in rows if row["part"] == part)
        print(f"{part}: {', '.join(f'{n} {word}' for word, n in counts.most_common())}")
    print(machine())
    return exit_code([f"not as it should be: {row['name']}" for row in rows if not row["ok"]])


class Once(Policy):
    """Policy of a single round, because only the check is of interest."""

    measures_memory = False

    def staying(self, racing: Sequence[Record], comparison: Comparison | None) -> Sequence[Record]:
        return ()


def examined(
    step: Callable[[], object], words: Sequence[str], model: Any = None, optimizer: Any = None
) -> Comparison:
    """Return a comparison of one round with the accuracy check.

    Without a model the step's own code is searched for models and optimizers.
    """
    variants = [variant(one) for one in ("baseline", *words)]
    models = list(model) if isinstance(model, torch.nn.ModuleList) else model
    measured = step_of(step) if model is None else step_of(step, models, optimizer or ())
    bench = Benchmark(measured, variants, ENOUGH_S, policy=Once())
    deque(bench.run(), maxlen=0)
    return bench.result()


def word(record: Record) -> str:
    """Return the verdict on a variant, or why there is none."""
    if record.failure:
        return "failed"
    return record.accuracy.verdict if record.accuracy else "not reached"


def judged(case: Case) -> Iterator[Row]:
    """Yield a row for each variant, whose `ok` tells whether the case allows the verdict."""
    torch.manual_seed(1)
    step, model, optimizer, words = case.make()
    allowed = ("not checked", *(("wrong",) if case.is_planted else ("exact", "rounding")))
    for record in examined(step, words, model, optimizer).records[1:]:
        if not case.is_planted and (record.same_as_baseline or record.declined):
            continue
        verdict = word(record)
        reason = record.accuracy.reason if record.accuracy else record.failure or ""
        name = f"{case}, {record.name}"
        yield {"name": name, "verdict": verdict, "reason": reason, "ok": verdict in allowed}


if __name__ == "__main__":
    sys.exit(main())

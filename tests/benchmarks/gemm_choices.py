"""Record, replay and predict the kernel choices of max-autotune, on the device at hand.

First max-autotune's searches for 21 matrix products (22 on CPUs) are recorded in FOLDER. Then each
product is compiled in the default mode, replayed, and predicted from all other products, with any
confidence. Prints the compile seconds and the milliseconds of a call. Stops after `--seconds`, and
goes on when started again. FOLDER/train is a SPEEDKIT_DATA folder with the recorded timings.

Goals on GPUs: prediction compiles 10 times as fast as max-autotune, and runs at 0.99 of its speed.
"""

import io
import itertools
import logging
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, NamedTuple
from unittest import mock

import torch
from _program import Row, append, machine, plain_parser, read
from _tables import markdown
from _timing import DEVICE, interleaved_s, timed
from torch import nn

from speedkit_jupyter.catalog.model_changes.compiled import compile_alone
from speedkit_jupyter.extras import autotune
from speedkit_jupyter.extras.autotune.ranking import Calibration
from speedkit_jupyter.extras.autotune.tuner import trained
from speedkit_jupyter.support import database

SEED, ROUNDS = 0, 30
# Number of products for each operation, by device: a prediction needs 20 others.
EACH = {"cuda": 7, "cpu": 11}
# Predictions of at least this confidence get a summary of their own.
CONFIDENT = 0.95
# Each device has sizes for M, and sizes for N and K.
SIZES = {
    "cuda": ((256, 512, 1024, 2048, 3072, 4096, 8192), (512, 768, 1024, 2048, 3072, 4096, 8192)),
    "cpu": ((16, 32, 64, 128, 256, 512), (256, 384, 512, 768, 1024, 1536, 2048)),
}
OPS = {"cuda": ("mm", "addmm", "bmm"), "cpu": ("mm", "addmm")}
MODE = "max-autotune-no-cudagraphs"
VARIANTS = ("default", "max-autotune", "replayed", "predicted")


class Product(NamedTuple):
    """Product without bias (`mm`), with bias (`addmm`), or of 8 matrices of half size (`bmm`)."""

    op: str
    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return "-".join(map(str, self))

    def call(self, device: str) -> tuple[Callable[..., Any], tuple[torch.Tensor, ...]]:
        """Return a function or module and its inputs; on CPUs weights are frozen into it."""
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        like = {"device": device, "dtype": dtype}
        if self.op == "bmm":
            m, n, k = (side // 2 for side in self[1:])
            a, b = torch.randn(8, m, k, **like), torch.randn(8, k, n, **like)
            return torch.bmm, (a, b)
        layer = nn.Linear(self.k, self.n, bias=self.op == "addmm", **like)
        return nn.Sequential(layer).eval(), (torch.randn(self.m, self.k, **like),)


def products(device: str) -> list[Product]:
    chance, (rows, sides) = random.Random(SEED), SIZES[device]
    sizes = [*itertools.product(rows, sides, sides)]
    each = [[Product(op, *one) for one in chance.sample(sizes, EACH[device])] for op in OPS[device]]
    return [product for some in zip(*each, strict=True) for product in some]


def compiled(product: Product, device: str, mode: str) -> tuple[float, Callable[[], object]]:
    """Return the seconds of a first call with an empty cache, and a function of ten more calls."""
    model, inputs = product.call(device)
    with (
        redirect_stderr(io.StringIO()),  # Inductor's own tables
        torch._inductor.utils.fresh_inductor_cache(),
        torch._inductor.config.patch(freezing=device == "cpu"),
    ):
        # compile_alone() needs no reset of Dynamo, which would compile the earlier calls again.
        function = compile_alone(lambda *given: model(*given), mode=mode, dynamic=False)
        took_s, _ = timed(lambda: function(*inputs))

    def calls() -> None:
        for _ in range(10):
            function(*inputs)

    return took_s, calls


def measured(product: Product, searched_s: float, device: str, folder: Path) -> Row:
    """Time each way to compile a product; predictions are learned from all other products.

    A replay runs the kernel that max-autotune found, so its milliseconds count for max-autotune.
    """
    calls: dict[str, Callable[[], object]] = {}
    row: Row = {"product": product, "max-autotune": {"compile_s": searched_s}}
    predicted = autotune.predictions(CONFIDENT, fallback=False)
    with tempfile.TemporaryDirectory() as others:
        gather([one for one in products(device) if one != product], device, folder, Path(others))
        ways: dict[str, tuple[Path, str, Any]] = {
            "default": (Path(others), "default", nullcontext()),
            "replayed": (folder / str(product), MODE, recording()),
            "predicted": (Path(others), MODE, predicted),
        }
        for name, (data, mode, way) in ways.items():
            with data_in(data), way as counted:
                took_s, calls[name] = compiled(product, device, mode)
            row[name] = {"compile_s": took_s}
    row["confidence"] = counted.mean_confidence
    for name, times in interleaved_s(calls, ROUNDS).items():
        row[name]["ms"] = median(times) * 100  # of one call, from the seconds of ten
    row["max-autotune"]["ms"] = row["replayed"]["ms"]
    return row


def data_in(folder: Path) -> Any:
    return mock.patch.dict(os.environ, SPEEDKIT_DATA=str(folder))


def gather(wanted: list[Product], device: str, folder: Path, into: Path) -> Calibration:
    """Copy these products' recorded timings to `into` and train on them; return the calibration."""
    for product in wanted:
        with data_in(folder / str(product)):
            every = database.kept("search")
        with data_in(into):
            for one in every:
                database.keep("search", one.name, one.task, one.value)
    with data_in(into):
        [model] = autotune.models(autotune.detected(device))
        return trained(model)


@contextmanager
def recording() -> Iterator[Any]:
    try:
        yield autotune.record()
    finally:
        autotune.off()


def line(row: Row) -> list[object]:
    op, *sizes = row["product"]
    cells = [f"{row[name]['compile_s']:.2f}, {row[name]['ms']:.4f}" for name in VARIANTS]
    sure = row["confidence"]
    known = "not predicted" if sure is None else f"{sure:.2f}"
    return [f"{op} {'×'.join(map(str, sizes))}", *cells, known]


def summary(rows: list[Row], which: str) -> list[str]:
    """Return lines that compare each way with max-autotune, as means over these products."""

    lines = ["", f"{len(rows)} products, {which}:"]
    for name in VARIANTS:
        compiles, runs = (
            geometric_mean(row["max-autotune"][key] / row[name][key] for row in rows)
            for key in ("compile_s", "ms")
        )
        lines += [f"{name}: compiles {compiles:.2f} times as fast as max-autotune, "
                  f"runs at {runs:.2f} of its speed"]  # fmt: skip
    return lines


def table(rows: list[Row]) -> str:
    """Return a line for each product, and the ratios of all and of the confident predictions."""
    head = ["product", *(f"{name}: s, ms" for name in VARIANTS), "confidence"]
    sure = [row for row in rows if (row["confidence"] or 0) >= CONFIDENT]
    lines = [markdown(head, *map(line, rows)), *summary(rows, "all that were held back")]
    lines += summary(sure, f"of a confidence from {CONFIDENT} on") if sure else []
    return "\n".join(lines)


def missing(every: list[Product], file: Path, end_s: float) -> Iterator[Product]:
    """Yield the products without a row in the file, until the time is `end_s`."""
    done = [Product(*row["product"]) for row in read(file)]
    for product in every:
        if product not in done and time.monotonic() < end_s:
            yield product


def main() -> None:
    parser = plain_parser(__doc__, seconds=50.0, device=DEVICE)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("gemm_choices"))
    options = parser.parse_args()
    device, folder = options.device, options.folder
    folder.mkdir(parents=True, exist_ok=True)
    logging.getLogger("torch._inductor.select_algorithm").setLevel(logging.CRITICAL)
    recorded, file = folder / "recorded.jsonl", folder / "rows.jsonl"
    every, end_s = products(device), time.monotonic() + options.seconds
    print(machine(device), flush=True)
    with torch.no_grad():
        compiled(Product("mm", 64, 64, 64), device, MODE)  # loads compilers and libraries
        for product in missing(every, recorded, end_s):
            with data_in(folder / str(product)), recording():
                took_s, _ = compiled(product, device, MODE)
            append(recorded, {"product": product, "compile_s": took_s})
        searched_s = {Product(*row["product"]): row["compile_s"] for row in read(recorded)}
        for product in missing(every, file, end_s):
            append(file, row := measured(product, searched_s[product], device, folder))
            print(*line(row), sep=" | ", flush=True)
    if rows := read(file):
        print(table(rows))
        print(gather(every, device, folder, folder / "train"))


if __name__ == "__main__":
    main()

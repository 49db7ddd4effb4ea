"""Is the choice of `tune_loader` as fast as the best of all settings?

On three data sets that are made on disk: pictures as PNG files, text files that are cut into
tokens, and numpy files one after another (iterable). Each is loaded with a step of its own. The
grid is every number of workers that may be used (of the iterable none): whole epochs, interleaved
in shuffled rounds, the middle of each. The best of them and the choice then run against each other
in fresh rounds: of several that are alike one always looks best in the rounds that chose it. Their
workers are started several times: the same settings differ by some 5 % from start to start.

    python tests/benchmarks/loader.py [--only DATA] [--rounds N] [--file loader.jsonl] [--table]

All of it once with torch's own number of threads and once with one, which leaves workers a core.
Exits 1 where the choice takes more than 1/0.97 of the best one's time.
"""

from __future__ import annotations

import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from _program import Row, collected, exit_code, interleaved_s, markdown, parser_of
from matplotlib import image
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from speedkit_jupyter import Hardware, tune_loader
from speedkit_jupyter.extras.data.loader_settings import LoaderSettings, end_workers, rebuilt

AT_LEAST, STARTS, BUDGET_S = 0.97, 6, 30.0
Made = tuple[DataLoader[Any], Callable[..., object]]


class Files(Dataset[Any]):
    """A sample from each file, by `read`."""

    def __init__(self, files: list[Path], read: Callable[[Path], torch.Tensor]) -> None:
        self.files, self.read = files, read

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.read(self.files[index]), index % 2


class Recordings(IterableDataset[Any]):
    """The rows of numpy files, one file after another."""

    def __init__(self, files: list[Path], rows: int) -> None:
        self.files, self.rows = files, rows

    def __len__(self) -> int:
        return len(self.files) * self.rows

    def __iter__(self) -> Iterator[torch.Tensor]:
        for file in self.files:
            for row in np.load(file):
                spectrum = np.abs(np.fft.rfft(row)).astype(np.float32)
                yield torch.from_numpy(np.log1p(spectrum))


def decoded(file: Path) -> torch.Tensor:
    """Return a PNG file, cut and scaled."""
    picture = image.imread(file)[4:60, 4:60, :3]
    picture = (picture - picture.mean((0, 1))) / picture.std((0, 1))
    return torch.from_numpy(picture.transpose(2, 0, 1).copy())


def tokens(file: Path) -> torch.Tensor:
    """Return a text file, cut into tokens."""
    words = re.findall(r"\w+|[^\w\s]", file.read_text().lower())
    return torch.tensor([sum(map(ord, word)) % 997 for word in words])


def trained(net: nn.Module, loss: Callable[..., torch.Tensor]) -> Callable[..., object]:
    """Return a step that takes a batch."""
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def step(*batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss(net, *batch).backward()
        optimizer.step()

    return step


def pictures(folder: Path) -> Made:
    """Return PNG files and a small CNN."""
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip
    files, pixels = [folder / f"{at}.png" for at in range(400)], np.random.default_rng(0)
    for file in files:
        image.imsave(file, pixels.integers(0, 255, (64, 64, 3), np.uint8))
    step = trained(net, lambda net, x, y: F.cross_entropy(net(x), y))
    return DataLoader(Files(files, decoded), batch_size=16, shuffle=True), step


def text(folder: Path) -> Made:
    """Return text files and an average of embeddings."""
    net = nn.Sequential(nn.EmbeddingBag(997, 64), nn.Linear(64, 2))
    files, words = [folder / f"{at}.txt" for at in range(1500)], random.Random(0)
    for file in files:
        file.write_text(" ".join("".join(words.choices("abcdefgh", k=5)) for _ in range(120)))
    step = trained(net, lambda net, x, y: F.cross_entropy(net(x), y))
    return DataLoader(Files(files, tokens), batch_size=32, shuffle=True), step


def arrays(folder: Path) -> Made:
    """Return numpy files and a wide autoencoder."""
    net = nn.Sequential(nn.Linear(129, 1024), nn.ReLU(), nn.Linear(1024, 129))
    files, noise = [folder / f"{at}.npy" for at in range(24)], np.random.default_rng(0)
    for file in files:
        np.save(file, noise.standard_normal((200, 256), np.float32))
    step = trained(net, lambda net, x: F.mse_loss(net(x), x))
    return DataLoader(Recordings(files, 200), batch_size=32), step


DATA = {"pictures": pictures, "text": text, "arrays": arrays}


def main() -> int:
    """Run the program."""
    parser = parser_of(__doc__, "loader.jsonl")
    parser.add_argument("--rounds", type=int, default=9, help="of the grid")
    options = parser.parse_args()
    threads = dict.fromkeys((torch.get_num_threads(), 1))
    keys = [{"data": name, "threads": number} for name in DATA for number in threads]
    rows = collected(
        options, keys, partial(measured, rounds=options.rounds), lambda row: " | ".join(_cells(row))
    )
    print(table(rows))
    misses = [row for row in rows if row["of_best"] < AT_LEAST]
    return exit_code([f"{row['data']}: {row['of_best']:.3f} of the best" for row in misses])


def measured(data: str, threads: int, rounds: int) -> Row:
    """Return the choice, and the time of an epoch with each setting of the grid."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with tempfile.TemporaryDirectory() as folder:
            loader, step = DATA[data](Path(folder))
            begun_s = time.perf_counter()
            chosen = tune_loader(loader, step, budget_s=BUDGET_S).tuning.chosen.settings
            took_s = time.perf_counter() - begun_s
            return {"chosen": chosen.words, "tuning_s": took_s} | against_grid(
                loader, step, chosen, rounds
            )
    finally:
        torch.set_num_threads(before)


def against_grid(
    loader: DataLoader[Any], step: Callable[..., object], chosen: LoaderSettings, rounds: int
) -> Row:
    """Return the best setting; the choice and that one then start their workers several times."""
    found = epochs_s(loader, step, dict.fromkeys([chosen, *grid(loader)]), rounds)
    times = {one: median(seconds) for one, seconds in found.items()}
    best = min(times, key=lambda one: times[one])
    fresh: dict[LoaderSettings, list[float]] = {chosen: [], best: []}
    for _ in range(STARTS):
        for one, seconds in epochs_s(loader, step, fresh, max(2 * rounds // STARTS, 1)).items():
            fresh[one] += seconds
    return {
        "best": best.words,
        "of_best": median(b / c for b, c in zip(fresh[best], fresh[chosen], strict=True)),
        "gain": times[LoaderSettings.of(loader)] / times[chosen],
        "epoch_s": {one.words: seconds for one, seconds in times.items()},
    }


def grid(loader: DataLoader[Any]) -> list[LoaderSettings]:
    """Return all settings that give the same batches in the same order."""
    is_iterable = isinstance(loader.dataset, IterableDataset)
    most = 0 if is_iterable else Hardware.current().cpu.usable_cores
    return [LoaderSettings(number) for number in range(most + 1)]


def epochs_s(
    loader: DataLoader[Any],
    step: Callable[..., object],
    settings: Iterable[LoaderSettings],
    rounds: int,
) -> dict[LoaderSettings, list[float]]:
    """Return seconds of whole epochs, in shuffled rounds; the first starts workers, untimed."""
    loaders = {one: rebuilt(loader, one) for one in settings}

    def epoch(one: DataLoader[Any]) -> None:
        for batch in one:
            step(*batch) if isinstance(batch, tuple | list) else step(batch)

    calls = {one: partial(epoch, loaders[one]) for one in loaders}
    found = interleaved_s(calls, rounds)
    for one in loaders.values():
        end_workers(one)
    return found


def table(rows: list[Row]) -> str:
    """Return Markdown."""
    head = ["data", "threads", "chosen", "best of the grid", "of the best", "over the user's own",
            "took"]  # fmt: skip
    where = rows[0]["machine"] if rows else "nothing was measured"
    return f"{where}\n\n{markdown(head, *map(_cells, rows))}"


def _cells(row: Row) -> list[str]:
    return [
        row["data"], str(row["threads"]), row["chosen"], row["best"], f"{row['of_best']:.3f}",
        f"{row['gain']:.2f}×", f"{row['tuning_s']:.0f} s",
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())

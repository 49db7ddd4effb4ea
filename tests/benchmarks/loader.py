"""Compare the choice of `tune_loader` with the best of all settings.

Three data sets are made on disk: pictures, text files that are cut into tokens, and numpy files as
an iterable data set. The grid has each number of workers up to the number of usable cores, and none
for the iterable data set. Its best setting has the lowest median time of an epoch in shuffled
rounds. Fresh rounds compare this setting with the chosen one, because the first rounds favor
lucky settings. Workers start several times, since each start changes the time by some 5 %.
All of it runs with torch's own number of threads, then with one, which leaves a core to workers.
Exits 1 if the choice takes more than 1/0.97 of the best setting's time.
"""

from __future__ import annotations

import random
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from _nets import pooled, training
from _program import Row, collected, parser_of, product
from _tables import reported
from _timing import interleaved_s, timed
from matplotlib import image
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from speedkit_jupyter import Hardware, tune_loader
from speedkit_jupyter.extras.data.loader_settings import LoaderSettings, end_workers, rebuilt

AT_LEAST, STARTS, BUDGET_S = 0.97, 6, 30.0
Made = tuple[DataLoader[Any], Callable[..., object]]


class Files(Dataset[Any]):
    def __init__(self, files: list[Path], read: Callable[[Path], torch.Tensor]) -> None:
        self.files, self.read = files, read

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.read(self.files[index]), index % 2


class Recordings(IterableDataset[Any]):
    def __init__(self, files: list[Path], rows: int) -> None:
        self.files, self.rows = files, rows

    def __len__(self) -> int:
        return len(self.files) * self.rows

    def __iter__(self) -> Iterator[torch.Tensor]:
        for file in self.files:
            for row in np.load(file):
                yield torch.from_numpy(np.log1p(np.abs(np.fft.rfft(row)).astype(np.float32)))


def decoded(file: Path) -> torch.Tensor:
    picture = image.imread(file)[4:60, 4:60, :3]
    picture = (picture - picture.mean((0, 1))) / picture.std((0, 1))
    return torch.from_numpy(picture.transpose(2, 0, 1).copy())


def tokens(file: Path) -> torch.Tensor:
    words = re.findall(r"\w+|[^\w\s]", file.read_text().lower())
    return torch.tensor([sum(map(ord, word)) % 997 for word in words])


def trained(net: nn.Module, loss: Callable[..., torch.Tensor]) -> Callable[..., object]:
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    return lambda *batch: training(lambda: loss(net, *batch), optimizer)()


def pictures(folder: Path) -> Made:
    layers = nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 16, 3, 2), nn.ReLU()
    net = pooled(*layers, width=16, classes=10)
    files, pixels = [folder / f"{at}.png" for at in range(400)], np.random.default_rng(0)
    for file in files:
        image.imsave(file, pixels.integers(0, 255, (64, 64, 3), np.uint8))
    step = trained(net, lambda net, x, y: F.cross_entropy(net(x), y))
    return DataLoader(Files(files, decoded), batch_size=16, shuffle=True), step


def text(folder: Path) -> Made:
    net = nn.Sequential(nn.EmbeddingBag(997, 64), nn.Linear(64, 2))
    files, words = [folder / f"{at}.txt" for at in range(1500)], random.Random(0)
    for file in files:
        file.write_text(" ".join("".join(words.choices("abcdefgh", k=5)) for _ in range(120)))
    step = trained(net, lambda net, x, y: F.cross_entropy(net(x), y))
    return DataLoader(Files(files, tokens), batch_size=32, shuffle=True), step


def arrays(folder: Path) -> Made:
    net = nn.Sequential(nn.Linear(129, 1024), nn.ReLU(), nn.Linear(1024, 129))
    files, noise = [folder / f"{at}.npy" for at in range(24)], np.random.default_rng(0)
    for file in files:
        np.save(file, noise.standard_normal((200, 256), np.float32))
    step = trained(net, lambda net, x: F.mse_loss(net(x), x))
    return DataLoader(Recordings(files, 200), batch_size=32), step


DATA = {"pictures": pictures, "text": text, "arrays": arrays}


def main() -> int:
    options = parser_of(__doc__, "loader.jsonl", rounds=9).parse_args()
    keys = product(data=DATA, threads=dict.fromkeys((torch.get_num_threads(), 1)))
    rows = collected(options, keys, partial(measured, rounds=options.rounds), _cells)
    promises = lambda row: {"slower than the best": row["of_best"] >= AT_LEAST}  # noqa: E731
    return reported(rows, HEAD, _cells, promises)


def measured(data: str, threads: int, rounds: int) -> Row:
    """Return the choice, and the time of an epoch with each setting of the grid."""
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        loader, step = DATA[data](Path(folder))
        took_s, found = timed(lambda: tune_loader(loader, step, budget_s=BUDGET_S))
        chosen = found.tuning.chosen.settings
        figures = against_grid(loader, step, chosen, rounds)
    return {"chosen": chosen.words, "tuning_s": took_s, **figures}


def against_grid(
    loader: DataLoader[Any], step: Callable[..., object], chosen: LoaderSettings, rounds: int
) -> Row:
    """Return the grid's best setting, and its time divided by the chosen setting's time."""
    is_iterable = isinstance(loader.dataset, IterableDataset)
    most = 0 if is_iterable else Hardware.current().cpu.usable_cores
    grid = dict.fromkeys([chosen, *map(LoaderSettings, range(most + 1))])
    found = epochs_s(loader, step, grid, rounds)
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


def epochs_s(
    loader: DataLoader[Any], step: Callable[..., object], settings: Iterable[LoaderSettings],
    rounds: int,
) -> dict[LoaderSettings, list[float]]:  # fmt: skip
    """Return the seconds of epochs in shuffled rounds, after an untimed epoch of each setting."""
    loaders = {one: rebuilt(loader, one) for one in settings}

    def epoch(one: DataLoader[Any]) -> None:
        for batch in one:
            step(*batch) if isinstance(batch, tuple | list) else step(batch)

    found = interleaved_s({one: partial(epoch, it) for one, it in loaders.items()}, rounds)
    for one in loaders.values():
        end_workers(one)
    return found


HEAD = ("data", "threads", "chosen", "best of the grid", "of the best", "over the user's own",
        "took")  # fmt: skip


def _cells(row: Row) -> list[str]:
    return [
        row["data"], str(row["threads"]), row["chosen"], row["best"], f"{row['of_best']:.3f}",
        f"{row['gain']:.2f}×", f"{row['tuning_s']:.0f} s",
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())

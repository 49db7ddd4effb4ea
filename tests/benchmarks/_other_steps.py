"""Five training loops like those of `_slow_steps.py`, by somebody who had not seen the rules.

Each function makes a fresh pair: the slow step and the quick one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn import metrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

FOLDERS: list[Any] = []  # which are removed when the program ends
Pair = tuple[Callable[[], object], Callable[[], object]]


class PictureFolder(Dataset[tuple[Tensor, int]]):
    """Pictures of a folder, one array file each, shrunk to 32 x 32."""

    def __init__(self, folder: str) -> None:
        self.files = sorted(Path(folder).glob("*.npy"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        picture = torch.from_numpy(np.load(self.files[index])).float() / 255
        small = F.interpolate(picture[None], size=(32, 32), mode="bilinear", antialias=True)
        return small[0], index % 10


class GraphNet(nn.Module):
    """Two rounds of averaging over neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)
        self.head = nn.Sequential(nn.Linear(64, 768), nn.ReLU(), nn.Linear(768, 7))

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        x = torch.relu(adjacency @ self.first(x))
        x = torch.relu(adjacency @ self.second(x))
        return self.head(x)


class FilmRatings(nn.Module):
    """Rates a film for a user from two embedding tables and an MLP."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.users = nn.Embedding(300_000, 32, sparse=sparse)
        self.films = nn.Embedding(20_000, 32, sparse=sparse)
        self.mlp = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, user: Tensor, film: Tensor) -> Tensor:
        both = torch.cat([self.users(user), self.films(film)], dim=1)
        return self.mlp(both).squeeze(-1)


def epochs(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    loss_of: Callable[[Tensor, Tensor], Tensor],
) -> Callable[[], object]:
    def epoch() -> float:
        total = 0.0
        for *inputs, y in loader:
            optimizer.zero_grad()
            loss = loss_of(model(*inputs), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
        return total / len(loader)

    return epoch


def cnn_pictures() -> Pair:
    """Trains a CNN on pictures of a folder for an epoch."""
    folder = tempfile.TemporaryDirectory()
    rng = np.random.default_rng(0)
    for i in range(96):
        picture = rng.integers(0, 256, (3, 192, 192), dtype=np.uint8)
        np.save(Path(folder.name) / f"{i:03d}.npy", picture)

    def make(data: Dataset[Any]) -> Callable[[], object]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
            nn.Flatten(), nn.Linear(512, 10),
        )  # fmt: skip
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        return epochs(model, optimizer, DataLoader(data, batch_size=16), F.cross_entropy)

    FOLDERS.append(folder)
    pictures = PictureFolder(folder.name)
    kept = [pictures[i] for i in range(len(pictures))]
    small = TensorDataset(torch.stack([x for x, _ in kept]), torch.tensor([y for _, y in kept]))
    return make(pictures), make(small)


def gnn_citations() -> Pair:
    """Trains a graph network to name the topic of each paper in a citation graph."""
    nodes, edges = 5000, 25_000
    torch.manual_seed(0)
    x = torch.randn(nodes, 64)
    y = torch.randint(0, 7, (nodes,))
    source, target = torch.randint(0, nodes, (2, edges))
    adjacency = torch.eye(nodes)
    adjacency[target, source] = 1.0
    adjacency /= adjacency.sum(1, keepdim=True)

    def make(graph: Tensor) -> Callable[[], object]:
        torch.manual_seed(1)
        model = GraphNet()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)

        def step() -> float:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x, graph), y)
            loss.backward()
            optimizer.step()
            return loss.item()

        return step

    return make(adjacency), make(adjacency.to_sparse())


def film_ratings() -> Pair:
    """Trains a film recommender on batches of ratings."""
    torch.manual_seed(0)
    users, films = torch.randint(0, 300_000, (2048,)), torch.randint(0, 20_000, (2048,))
    stars = torch.randint(1, 6, (2048,)).float()

    def make(sparse: bool) -> Callable[[], object]:
        torch.manual_seed(1)
        model = FilmRatings(sparse)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        loader = DataLoader(TensorDataset(users, films, stars), batch_size=256)
        return epochs(model, optimizer, loader, F.mse_loss)

    return make(False), make(True)


def tabular_churn() -> Pair:
    """Trains an MLP on a table of customers for an epoch and reports the AUC."""
    torch.manual_seed(0)
    x = torch.randn(6400, 20)
    y = (x[:, 0] + torch.randn(6400) > 0).float()

    def make(each_batch: bool) -> Callable[[], object]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 1), nn.Flatten(0))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        loader = DataLoader(TensorDataset(x, y), batch_size=200)

        def epoch() -> float:
            scores, truths, auc = [], [], 0.0
            for i, (rows, labels) in enumerate(loader, start=1):
                optimizer.zero_grad()
                logits = model(rows)
                F.binary_cross_entropy_with_logits(logits, labels).backward()
                optimizer.step()
                scores.extend(logits.tolist())
                truths.extend(labels.tolist())
                if each_batch or i == len(loader):
                    auc = float(metrics.roc_auc_score(truths, scores))
            return auc

        return epoch

    return make(True), make(False)


def segment_slices() -> Pair:
    """Predicts the masks of a scan, slice by slice, with a small segmentation net."""
    torch.manual_seed(0)
    scan = torch.randn(48, 1, 128, 128)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 12, 3, padding=1)
    ).eval()

    @torch.no_grad()
    def slow() -> Tensor:
        masks = torch.empty(0, 12, 128, 128)
        for piece in scan.split(1):
            masks = torch.cat([masks, model(piece).softmax(1)])
        return masks

    @torch.no_grad()
    def quick() -> Tensor:
        return torch.cat([model(piece).softmax(1) for piece in scan.split(1)])

    return slow, quick


# The rules that name what makes each loop slow; any one of them will do.
CAUSES = {
    "cnn_pictures": ("kept_samples",),
    "gnn_citations": ("sparse_products",),
    "film_ratings": ("dense_embeddings",),
    "tabular_churn": ("slow_lines",),
    "segment_slices": ("growing_copies",),
}

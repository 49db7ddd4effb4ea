"""Which kernels are likely the fastest for a product, learned from the timings of others."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from speedkit_jupyter.extras.autotune.problems import KernelSearch, Problem
from speedkit_jupyter.support.exceptions import SpeedKitError

# A kernel within this of the fastest is as good as it: timings repeat no better.
NEAR = 0.02
# How many kernels a prediction leaves to be timed at most.
MOST = 3
# What counts as the time of a kernel that could not run, in times of the fastest.
FAILED = 20.0
# Fewer searches than this can't show that 95 % of predictions hold.
LEAST_SEARCHES = 20
# A size beyond what was recorded by more than this factor is not predicted.
BEYOND = 1.5
TREES, FOLDS = 100, 5
NUMBER = re.compile(r"(\w+)=(\d{1,9})\b")
TILE = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_stages", "num_warps", "GROUP_M")
Share = Annotated[float, Field(ge=0, le=1)]
BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "int8": 1}


@dataclass(frozen=True)
class Calibration:
    """How far the trees' agreement can be trusted, from shapes that were held back.

    `agreement` and `right` are a rising curve; `top` is the share of these shapes for which the
    first 1, 2, 3 kernels hold one within 2 % of the fastest.
    """

    agreement: tuple[Share, ...] = field(repr=False)
    right: tuple[Share, ...] = field(repr=False)
    top: tuple[Share, Share, Share]
    shapes: int

    def __post_init__(self) -> None:
        if not 0 < len(self.agreement) == len(self.right):
            raise ValueError("a curve has as many points of both")

    def confidence(self, agreement: float) -> float:
        return float(np.interp(agreement, self.agreement, self.right))


class Ranking:
    """A forest over features of shape, dtype, tile configuration and device.

    It predicts how many times slower a kernel is than the fastest of its product, as a logarithm.
    """

    def __init__(self, searches: Sequence[KernelSearch]) -> None:
        ensemble = _sklearn("ensemble")

        self._kinds = sorted({_kind(label) for one in searches for label in one.offered})
        self._ops = sorted({(one.problem.op, one.problem.inputs[0].dtype) for one in searches})
        sizes = np.array([one.problem.sizes for one in searches])
        self._low, self._high = sizes.min(0) / BEYOND, sizes.max(0) * BEYOND
        rows = [self._features(one.problem, label) for one in searches for label in one.offered]
        times = [math.log(slower) for one in searches for slower in one.slower(FAILED)]
        self._forest = ensemble.ExtraTreesRegressor(TREES, min_samples_leaf=2, random_state=0)
        self._forest.fit(np.array(rows), np.array(times))

    def knows(self, problem: Problem, labels: Sequence[str]) -> bool:
        """Return whether it has seen such operations, dtypes, kernels, and sizes about as large."""
        sizes = zip(self._low, problem.sizes, self._high, strict=True)
        return (
            (problem.op, problem.inputs[0].dtype) in self._ops
            and {*map(_kind, labels)} <= {*self._kinds}
            and all(low <= size <= high for low, size, high in sizes)
        )

    def guesses(self, problem: Problem, labels: Sequence[str]) -> Iterator[tuple[list[str], float]]:
        """Yield the first, the first two, and the first three kernels of the ranking, never all:
        each time with the share of trees that find one of these the fastest.
        """
        rows = np.array([self._features(problem, label) for label in labels])
        each = np.array([tree.predict(rows) for tree in self._forest.estimators_])
        order = each.mean(0).argsort()
        fastest = each.min(1)
        for number in range(1, min(MOST + 1, len(labels))):
            found = each[:, order[:number]].min(1)
            agreement = (found <= fastest + math.log1p(NEAR)).mean()
            yield [labels[index] for index in order[:number]], float(agreement)

    def _features(self, problem: Problem, label: str) -> list[float]:
        batch, m, n, k = problem.sizes
        given = {name: int(value) for name, value in NUMBER.findall(label)}
        tile = [given.get(name, 0) for name in TILE]
        across, down = max(given.get("BLOCK_M", m), 1), max(given.get("BLOCK_N", n), 1)
        tiles = batch * math.ceil(m / across) * math.ceil(n / down)
        waves = tiles / problem.device.units
        used = batch * m * n / (tiles * across * down)
        left = problem.inputs[problem.left]
        right = problem.inputs[min(problem.left + 1, len(problem.inputs) - 1)]
        shape = [math.log2(max(one, 1)) for one in (batch, m, n, k, batch * m * n * k)]
        return [
            *shape,
            *(one.strides[-1] == 1 for one in (left, right)),
            BYTES.get(left.dtype, 4),
            *(problem.op == op for op in ("mm", "addmm", "bmm", "baddbmm")),
            "BLOCK_M" not in given,  # a library's
            *(_kind(label) == kind for kind in self._kinds),
            *tile,
            math.log2(tiles),
            waves,
            waves / math.ceil(waves),
            used,
            k / max(given.get("BLOCK_K", k), 1),
            problem.device.units,
        ]


def calibrated(searches: Sequence[KernelSearch]) -> Calibration:
    """Rank shapes that were held back, in turn, and return how well that went.

    Raises SpeedKitError for too few searches.
    """
    if len(searches) < LEAST_SEARCHES:
        raise SpeedKitError(
            f"{len(searches)} whole searches are recorded, and training needs {LEAST_SEARCHES}: "
            "compile more shapes with mode='max-autotune' after `%speedkit autotune record`"
        )
    selection, isotonic = _sklearn("model_selection"), _sklearn("isotonic")
    agreement, right = list[float](), list[bool]()
    top = [0] * MOST
    folds = selection.KFold(FOLDS, shuffle=True, random_state=0)
    for known, held_back in folds.split([*searches]):
        ranking = Ranking([searches[index] for index in known])
        for one in (searches[index] for index in held_back):
            slower = dict(zip(one.offered, one.slower(FAILED), strict=True))
            guesses = [*ranking.guesses(one.problem, one.offered)]
            hits = [min(map(slower.__getitem__, first)) <= 1 + NEAR for first, _ in guesses]
            agreement += [share for _, share in guesses]
            right += hits
            full = [*hits, *[True] * (MOST - len(hits))]  # all kernels hold the fastest
            top = [number + hit for number, hit in zip(top, full, strict=True)]
    curve = isotonic.IsotonicRegression(y_min=0, y_max=1).fit(agreement, right)
    # n right of n say no more than n of n + 1: the rule of succession, without its prior.
    shapes = len(searches)
    trusted = shapes / (shapes + 1)
    return Calibration(
        tuple(map(float, curve.X_thresholds_)),
        tuple(float(one) * trusted for one in curve.y_thresholds_),
        (top[0] / shapes, top[1] / shapes, top[2] / shapes),
        shapes,
    )


def _kind(label: str) -> str:
    return label.partition("(")[0]


def _sklearn(name: str) -> Any:
    try:
        return import_module(f"sklearn.{name}")
    except ImportError:
        raise SpeedKitError(
            "predictions need scikit-learn: `pip install scikit-learn` (recording does not)"
        ) from None

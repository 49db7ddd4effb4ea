"""Describe Inductor's kernel searches for matrix products, and predict the fast kernels."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from speedkit_jupyter.machines import hardware
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.units import count
from speedkit_jupyter.torchglue import inductor as torch_private

# For each library kernel, its operation and the position of the left matrix among its inputs.
LIBRARY = {
    "mm": ("mm", 0), "addmm": ("addmm", 1), "bias_addmm": ("addmm", 1), "bmm": ("bmm", 0),
    "baddbmm": ("baddbmm", 1), torch_private.MKL_KERNEL: ("linear", 0),
    torch_private.ONEDNN_KERNEL: ("linear", 0),
}  # fmt: skip
# Inductor numbers generated kernels: `triton_mm_12`.
COUNT = re.compile(r"_\d+$")
# A kernel within 2 % of the fastest counts as right, because repeated timings differ by as much.
NEAR = 0.02
# Largest number of kernels in a prediction; Inductor times them.
MOST_KERNELS = 3
# Assumed time of a kernel without a timing (it may have failed), as a multiple of the fastest time.
FAILED = 20.0
# n searches give a confidence of n ÷ (n + 1) at most: fewer searches can't exceed 95 %.
LEAST_SEARCHES = 20
# Predictions cover sizes from the smallest recorded size ÷ BEYOND to the largest × BEYOND.
BEYOND = 1.5
NUMBER = re.compile(r"(\w+)=(\d{1,9})\b")
TILE = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_stages", "num_warps", "GROUP_M")


@dataclass(frozen=True)
class DeviceName:
    """A device's name and number of units: multiprocessors of a GPU, threads on a CPU, else 1."""

    name: str
    units: int

    @property
    def model(self) -> str:
        return "-".join([*re.split(r"[^\w.]+", self.name), "matmul"])


@dataclass(frozen=True)
class Input:
    """One operand: sizes and strides in elements, and the dtype such as `float32`."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Problem:
    """A matrix product of shape `output` on a device; `inputs[left]` is the left matrix."""

    op: str
    left: int
    inputs: tuple[Input, ...]
    output: tuple[int, ...]
    precision: str
    versions: str
    device: DeviceName

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        *batch, m, n = self.output
        return math.prod(batch), m, n, self.inputs[self.left].sizes[-1]


@dataclass(frozen=True)
class KernelSearch:
    """A search: timings in ms by kernel, all `offered` kernels, and the search's seconds."""

    problem: Problem
    offered: tuple[str, ...]
    timings: Mapping[str, float]
    seconds: float

    @property
    def is_whole(self) -> bool:
        return len(self.timings) * 2 > len(self.offered)

    def slower(self) -> list[float]:
        best = min(self.timings.values())
        return [self.timings.get(one, FAILED * best) / best for one in self.offered]


def label(choice: Any) -> str:
    """Return a kernel's name and configuration without Inductor's running numbers."""
    return f"{COUNT.sub('', choice.name)}({choice.description})"


def problem_of(choices: Sequence[Any]) -> Problem | None:
    """Return the matrix product that the kernels compute; None if it can't be recorded."""
    known = [one for one in choices if torch_private.is_library_kernel(one) and one.name in LIBRARY]
    if not known or len({*map(label, choices)}) < len(choices):
        return None
    op, left = LIBRARY[known[0].name]
    nodes, layout = known[0].input_nodes, known[0].layout
    sides = [(node.get_size(), node.get_stride(), str(node.get_dtype())) for node in nodes]
    output = [*layout.size]
    numbers = [*output, *(one for sizes, strides, _ in sides for one in (*sizes, *strides))]
    if not all(isinstance(one, int) or one.is_number for one in numbers) or len(output) < 2:
        return None
    inputs = tuple(
        Input(tuple(map(int, sizes)), tuple(map(int, strides)), dtype.removeprefix("torch."))
        for sizes, strides, dtype in sides
    )
    precision = torch.get_float32_matmul_precision()  # decides whether TF32 is used
    shape, device = tuple(map(int, output)), device_of(layout.device)
    return Problem(op, left, inputs, shape, precision, versions(), device)


def device_of(device: Any = None) -> DeviceName:
    """Return a torch.device's DeviceName (default: the current CUDA GPU, or else the CPU)."""
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return DeviceName(properties.name, properties.multi_processor_count)
    if device.type != "cpu":
        return DeviceName(device.type, 1)
    name = hardware.cpu_name(getattr(torch.cpu, "get_capabilities", dict)())
    threads = torch.get_num_threads()
    return DeviceName(f"{name} {count(threads, 'thread')}", threads)


def versions() -> str:
    """Return the versions of torch and Triton; timings hold only for the same versions."""
    triton = import_module("triton") if find_spec("triton") else None
    return f"torch {torch.__version__}" + (f", Triton {triton.__version__}" if triton else "")


@dataclass(frozen=True)
class Calibration:
    """The share of right predictions by the agreement of the trees; `shapes` counts searches."""

    agreement: tuple[float, ...] = field(repr=False)
    right: tuple[float, ...] = field(repr=False)
    shapes: int

    def confidence(self, agreement: float) -> float:
        return float(np.interp(agreement, self.agreement, self.right))


class Ranking:
    """A random forest that predicts the log of a kernel's time ÷ the fastest kernel's time."""

    def __init__(self, searches: Sequence[KernelSearch]) -> None:
        forest = _sklearn("ensemble").ExtraTreesRegressor(100, min_samples_leaf=2, random_state=0)
        self._kinds = sorted({_kind(label) for one in searches for label in one.offered})
        self._ops = {(one.problem.op, one.problem.inputs[0].dtype) for one in searches}
        sizes = np.array([one.problem.sizes for one in searches])
        self._low, self._high = sizes.min(0) / BEYOND, sizes.max(0) * BEYOND
        rows = [self._features(one.problem, label) for one in searches for label in one.offered]
        times = [math.log(slower) for one in searches for slower in one.slower()]
        self._forest = forest.fit(np.array(rows), np.array(times))

    def knows(self, problem: Problem, labels: Sequence[str]) -> bool:
        sizes = zip(self._low, problem.sizes, self._high, strict=True)
        return (
            (problem.op, problem.inputs[0].dtype) in self._ops
            and {*map(_kind, labels)} <= {*self._kinds}
            and all(low <= size <= high for low, size, high in sizes)
        )

    def guesses(self, problem: Problem, labels: Sequence[str]) -> Iterator[tuple[list[str], float]]:
        """Yield the best 1 to MOST_KERNELS kernels (never all) and the share of agreeing trees."""
        rows = np.array([self._features(problem, label) for label in labels])
        each = np.array([tree.predict(rows) for tree in self._forest.estimators_])
        order, right = each.mean(0).argsort(), each.min(1) + math.log1p(NEAR)
        for number in range(1, min(MOST_KERNELS + 1, len(labels))):
            agreement = (each[:, order[:number]].min(1) <= right).mean()
            yield [labels[index] for index in order[:number]], float(agreement)

    def _features(self, problem: Problem, label: str) -> list[float]:
        batch, m, n, k = problem.sizes
        given = {name: int(value) for name, value in NUMBER.findall(label)}
        tile = [given.get(name, 0) for name in TILE]
        across, down = max(given.get("BLOCK_M", m), 1), max(given.get("BLOCK_N", n), 1)
        tiles, units = batch * math.ceil(m / across) * math.ceil(n / down), problem.device.units
        waves, used = tiles / units, batch * m * n / (tiles * across * down)
        sides = problem.inputs[problem.left : problem.left + 2]
        shape = [math.log2(max(one, 1)) for one in (batch, m, n, k, batch * m * n * k)]
        layout = [one.strides[-1] == 1 for one in (sides[0], sides[-1])]
        kinds = [
            getattr(torch, sides[0].dtype).itemsize,
            *(problem.op == op for op in ("mm", "addmm", "bmm", "baddbmm")),
            "BLOCK_M" not in given,  # a library's kernel, or a C++ kernel
            *(_kind(label) == kind for kind in self._kinds),
        ]
        steps = k / max(given.get("BLOCK_K", k), 1)
        use = [math.log2(tiles), waves, waves / math.ceil(waves), used, steps, units]
        return [*shape, *layout, *kinds, *tile, *use]


def calibrated(searches: Sequence[KernelSearch]) -> Calibration:
    """Return a cross-validated calibration. Raises SpeedKitError for few searches or no sklearn."""
    if len(searches) < LEAST_SEARCHES:
        raise SpeedKitError(
            f"{len(searches)} whole searches are recorded, but training needs {LEAST_SEARCHES}: "
            "compile more shapes with mode='max-autotune' after `%speedkit autotune record`"
        )
    selection, isotonic = _sklearn("model_selection"), _sklearn("isotonic")
    agreement, right = list[float](), list[bool]()
    folds = selection.KFold(5, shuffle=True, random_state=0)
    for known, held_back in folds.split([*searches]):
        ranking = Ranking([searches[index] for index in known])
        for one in (searches[index] for index in held_back):
            slower = dict(zip(one.offered, one.slower(), strict=True))
            for guess, share in ranking.guesses(one.problem, one.offered):
                agreement.append(share)
                right.append(min(slower[name] for name in guess) <= 1 + NEAR)
    curve = isotonic.IsotonicRegression(y_min=0, y_max=1).fit(agreement, right)
    # n correct predictions of n count as n of n + 1: few cases never give certainty.
    trusted = curve.y_thresholds_ * len(searches) / (len(searches) + 1)
    shares, confidences = (tuple(map(float, one)) for one in (curve.X_thresholds_, trusted))
    return Calibration(shares, confidences, len(searches))


def _kind(label: str) -> str:
    return label.partition("(")[0]


def _sklearn(name: str) -> Any:
    try:
        return import_module(f"sklearn.{name}")
    except ImportError:
        raise SpeedKitError("predictions need `pip install scikit-learn`") from None

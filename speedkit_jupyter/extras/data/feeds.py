"""Batches of another size for a step: as its argument, from its loader, or by variable names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import CellType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from speedkit_jupyter.extras.data.loader_settings import begun_with
from speedkit_jupyter.state.handlers.names import Names
from speedkit_jupyter.step.step import Step
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.torchglue.private import tree_leaves
from speedkit_jupyter.torchglue.samples import EMPTY, each_taken, length_of


@dataclass
class Feed:
    """The step's own `batch`, and `put`, which gives the step another batch.

    `source` says in words where batches come from. `drawn` counts how often the step took the batch
    since `put`; `installed` surrounds all calls.
    """

    batch: Any
    put: Callable[[Any], object]
    source: str
    drawn: Callable[[], int] = lambda: 1
    installed: Callable[[], AbstractContextManager[None]] = nullcontext

    def __post_init__(self) -> None:
        self.now = length_of(self.batch) or 0
        if not self.now:
            raise StepError(
                "there is no tensor in the batch whose first dimension is its size, 1 or more"
            )

    @property
    def sample_bytes(self) -> float:
        return sum(getattr(leaf, "nbytes", 0) for leaf in tree_leaves(self.batch)) / self.now

    @contextmanager
    def of(self, number: int) -> Iterator[None]:
        """Give the step batches of this size in the block."""
        try:
            self.put(resized(self.batch, number))
            yield
        finally:
            self.put(self.batch)


def first_of(loader: DataLoader[Any]) -> Any:
    """Return the first batch. Raises StepError if there is none."""
    for batch in loader:
        return batch
    raise StepError(EMPTY)


def through(loader: DataLoader[Any]) -> Feed:
    """Return the feed of a step that goes through a loader: each loop over it gets one batch."""
    given, drawn = [None], [0]

    def put(batch: Any) -> None:
        given[0], drawn[0] = batch, 0

    def begin() -> Iterator[Any]:
        drawn[0] += 1
        return iter(given)

    words, installed = "its loader, one batch a call, loaded before", partial(begun_with, loader)
    return Feed(first_of(loader), put, words, lambda: drawn[0], partial(installed, begin))


# A variable: its name, the tensor in it, and a function that binds another value.
Variable = tuple[str, Any, Callable[[Any], object]]


def named(step: Step, given: Sequence[Any] = ()) -> Feed:
    """Return the feed of a step that reads tensors by their names.

    They are the `given` tensors, or all with the first dimension that most of them have. Raises
    StepError if there are none.
    """
    found = _variables(step)
    if given:
        wanted = set(map(id, given))
        found = [one for one in found if id(one[1]) in wanted]
        if len({id(value) for _, value, _ in found}) < len(wanted):
            raise StepError(
                "the step takes no argument, and not everything that was given as its batch is a "
                "tensor that it reads by a name of its own: leave out the others"
            )
    lengths = Counter(length_of(value) for _, value, _ in found).most_common()
    now = next((length for length, _ in lengths if length and length > 1), None)
    if now is None:
        raise StepError(
            "what is a batch in this step? Give a function that takes one, and its batch or "
            "loader; or one that reads tensors with the same first dimension"
        )
    found = [one for one in found if length_of(one[1]) == now]

    def put(batch: Mapping[int, Any]) -> None:
        for _, value, bind in found:
            bind(batch[id(value)])

    names = ", ".join(sorted({name for name, _, _ in found}))
    return Feed({id(value): value for _, value, _ in found}, put, f"{names} ({now} samples each)")


def _variables(step: Step) -> list[Variable]:
    """Return the variables that hold tensors, without parameters and buffers."""
    walk, found = step.walk(), list[Variable]()
    for holder in walk.near:
        if isinstance(holder, Names):
            space = holder.space
            found += [(n, space.get(n), partial(space.__setitem__, n)) for n in holder.all]
        elif isinstance(holder, CellType) and holder != CellType():
            value = holder.cell_contents
            found.append((walk.name(value), value, partial(setattr, holder, "cell_contents")))
    buffers = {id(one) for model in step.models for one in model.buffers()}
    tensors = (one for one in found if isinstance(one[1], torch.Tensor))
    kept = (one for one in tensors if not isinstance(one[1], torch.nn.Parameter))
    return [one for one in kept if id(one[1]) not in buffers]


def resized(batch: Any, number: int) -> Any:
    """Return `number` samples of a batch: the first samples, repeated if there are too few."""
    length = length_of(batch) or 1

    def take(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value[np.arange(number) % length]
        if not isinstance(value, torch.Tensor):
            return type(value)(value[at % length] for at in range(number))
        samples = value.detach()[torch.arange(number, device=value.device) % length]
        if value.ndim == 4 and value.is_contiguous(memory_format=torch.channels_last):
            samples = samples.contiguous(memory_format=torch.channels_last)
        return samples.requires_grad_(value.requires_grad)

    return each_taken(batch, length, take)

"""Tensors made from Python's lists, number by number."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from speedkit_jupyter.advice.gain import amdahl
from speedkit_jupyter.advice.opportunity import Opportunity, Subject
from speedkit_jupyter.advice.rules.base import Rule
from speedkit_jupyter.advice.situation import Situation
from speedkit_jupyter.measure.rounds.confinement import patched
from speedkit_jupyter.support.words import share

LEAST = 0.03
NAMES = ("torch.tensor", "torch.as_tensor", "torch.FloatTensor", "torch.LongTensor", "torch.Tensor")


class TensorOfList(Rule):
    """`torch.tensor(list)` asks every number what it is."""

    name: ClassVar[str] = "tensor_of_list"

    def find(self, seen: Situation) -> Iterator[Opportunity]:
        """Where such a call takes part of the step."""
        for part, node in seen.code.calls(*NAMES):
            taken = seen.line_share(part, node)
            if taken < LEAST or not node.args or isinstance(node.args[0], ast.Constant):
                continue
            yield Opportunity(
                self.name,
                "keep the numbers in an array or a tensor, not in a list",
                f"{seen.place(part, node)}: `{ast.unparse(node)}`, {share(taken)} of the step",
                amdahl(taken, 1.8),
                "torch.from_numpy(array), or make the tensor once, before the loop",
                "a tensor of an array shares its memory",
                trial=by_numpy,
                spots=part.spots(part.statement(node)),
            )


@contextmanager
def by_numpy(_: Subject) -> Iterator[None]:
    """`torch.tensor` of a list goes through an array."""
    import numpy as np
    import torch

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(data: Any, *args: Any, **kwargs: Any) -> Any:
            if type(data) is not list:
                return original(data, *args, **kwargs)
            array = np.asarray(data)
            if array.dtype == np.float64 and kwargs.get("dtype") is None:
                kwargs["dtype"] = torch.get_default_dtype()
            return original(array, *args, **kwargs) if array.dtype != object else original(data)

        return call

    with patched(torch, "tensor", make):
        yield

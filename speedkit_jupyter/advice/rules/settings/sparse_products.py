"""Products with a matrix that is almost all zeros."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from speedkit_jupyter.advice.gain import Gain, amdahl
from speedkit_jupyter.advice.opportunity import Opportunity
from speedkit_jupyter.advice.rules.base import Rule
from speedkit_jupyter.advice.situation import Situation
from speedkit_jupyter.support.words import share

if TYPE_CHECKING:
    import torch

# Sparse kernels are an order of magnitude slower for each number that is not zero.
ZEROS, NUMBERS = 0.98, 500_000
SLOWER = 10
LEAST = 0.1
OPERATORS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::matmul")
# Of these products so much is with that matrix at the least.
HALF = 0.5


class SparseProducts(Rule):
    """A dense adjacency matrix, say, given to a model."""

    name: ClassVar[str] = "sparse_products"

    def find(self, seen: Situation) -> Iterator[Opportunity]:
        """Each such matrix among the tensors that models are given, or keep as a buffer."""
        taken = min(seen.operators(*OPERATORS), 0.95)
        if taken < LEAST:
            return
        for matrix, name in _matrices(seen):
            full = float(matrix.count_nonzero()) / matrix.numel()
            if not 0 < full <= 1 - ZEROS:
                continue
            rows, columns = matrix.shape
            yield Opportunity(
                self.name,
                f"{name} as a sparse tensor",
                f"{name} ({rows:,}×{columns:,}) is zero in {100 * (1 - full):.4g} % of its "
                f"places; products of matrices: {share(taken)} of the step",
                Gain(amdahl(taken * HALF, 2.0).low, amdahl(taken, 1 / (SLOWER * full)).low),
                f"{name}.to_sparse_csr() or .to_sparse(), made once, in front of the loop",
                "sums are added up in another order",
            )


def _matrices(seen: Situation) -> Iterator[tuple[torch.Tensor, str]]:
    """Large ones, each once, as the user calls them."""
    import torch

    given = [one for call in seen.watched.of_models() for one in call.inputs]
    given += [one for model in seen.models for one in model.buffers()]
    for one in {id(one): one for one in given}.values():
        is_matrix = one.dim() == 2 and one.layout is torch.strided and one.is_floating_point()
        if is_matrix and one.numel() >= NUMBERS:
            yield one, seen.name(one, "the matrix")

"""Linear layers with 2:4 sparse weights: two of each four in a row are zero."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import torch

from speedkit_jupyter.catalog.base.compression import FOR_GOOD, Compression, own_weight
from speedkit_jupyter.catalog.base.decision import Decision, Form, Snippet
from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.machines.hardware import Hardware

HALVES = ("bfloat16", "float16")
CODE = """\
for module in model.modules():
    if type(module) is torch.nn.Linear and not any(n % 16 for n in module.weight.shape):
        groups = module.weight.detach().reshape(-1, 4)
        {line}
            weight = to_sparse_semi_structured(groups.view(module.weight.shape))
            module.weight = torch.nn.Parameter(weight, requires_grad=False)"""
TAKE = "if (groups != 0).sum(1).max() <= 2:"
PRUNE = "for groups in [groups.scatter(1, groups.abs().topk(2, largest=False).indices, 0)]:"


class Sparsity(Compression):
    """For inference. `true` takes weights that are 2:4 sparse already; `prune` sets the two smaller
    ones of each four to zero in all weights.
    """

    name = "sparsity"
    library = ""
    summary = "linear layers by 2:4 sparse weights"
    helps = "inference with large linear layers that were pruned to 2:4, on Ampere and later"
    risk = "`prune` makes another model: it leaves out half of each weight, and trains nothing"
    page = "https://docs.pytorch.org/docs/stable/sparse.html#sparse-semi-structured-tensors"
    multiples, also = (16, 16), "; without `prune` two zeros in each four of a row"
    since, units = (8, 0), "Sparse Tensor Cores"
    Options = Literal["auto", True, False, "prune"]

    def missing_units(self, value: Any, hardware: Hardware, facts: Facts) -> str:
        if hardware.system == "Windows":
            return "torch has no kernels for it on Windows"
        if not {*HALVES} & {*facts.dtypes}:
            return f"its kernels multiply {' and '.join(HALVES)}: model.bfloat16() is yours to type"
        return super().missing_units(value, hardware, facts)

    def fits(self, value: Any, weight: torch.Tensor) -> bool:
        is_fit = super().fits(value, weight) and str(weight.dtype).endswith(HALVES)
        return is_fit and (value == "prune" or is_sparse(weight.detach()))

    def made(self, value: Any, layer: torch.nn.Linear) -> Any:
        """Return the weight in the kernels' format, which torch calls a prototype."""
        weight = own_weight(layer).detach()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The PyTorch API of SparseSemiStructuredTensor")
            values = pruned(weight) if value == "prune" else weight
            return torch.sparse.to_sparse_semi_structured(values.contiguous())

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        lines = CODE.format(line=PRUNE if decision.value == "prune" else TAKE).splitlines()
        imports = ("from torch.sparse import to_sparse_semi_structured",)
        return Snippet(f"{decision.reason}; {FOR_GOOD}", imports=imports, model=tuple(lines))


def is_sparse(weight: torch.Tensor) -> bool:
    """Return whether two or more of each four in a row are zero."""
    return bool((weight.reshape(-1, 4) != 0).sum(1).max() <= 2)


def pruned(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight without the two of each four in a row that are smaller by magnitude."""
    groups = weight.reshape(-1, 4)
    return groups.scatter(1, groups.abs().topk(2, largest=False).indices, 0).view(weight.shape)

"""Linear layers by weights that are 2:4 sparse: two of each four in a row are zero."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.optimizations.autocast.autocast_source import DTYPES
from speedkit_jupyter.optimizations.base.decision import Decision, Effect
from speedkit_jupyter.optimizations.base.snippet import Form, Snippet
from speedkit_jupyter.optimizations.base.target import Target
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.optimizations.twins.compression import Compression, for_good, older_than

if TYPE_CHECKING:
    import torch

# The first compute capability with Sparse Tensor Cores, whose numbers have 16 bits.
SINCE = (8, 0)
HALVES = ("bfloat16", "float16")
PROTOTYPE = "The PyTorch API of SparseSemiStructuredTensor"
TAKE = """\
for module in model.modules():
    if type(module) is torch.nn.Linear and not any(n % 16 for n in module.weight.shape):
        weight = module.weight.detach()
        if (weight.reshape(-1, 4) != 0).sum(1).max() <= 2:
            weight = to_sparse_semi_structured(weight{cast}.contiguous())
            module.weight = torch.nn.Parameter(weight, requires_grad=False)"""
PRUNE = """\
for module in model.modules():
    if type(module) is torch.nn.Linear and not any(n % 16 for n in module.weight.shape):
        groups = module.weight.detach().reshape(-1, 4)
        groups = groups.scatter(1, groups.abs().topk(2, largest=False).indices, 0)
        weight = to_sparse_semi_structured(groups.view(module.weight.shape){cast})
        module.weight = torch.nn.Parameter(weight, requires_grad=False)"""


class Sparsity(Compression):
    """For inference: the zeros of a weight are left out of its products.

    The word alone takes weights that are 2:4 sparse already, and computes what they would. `prune`
    takes all of them, without the two smaller ones of each four.
    """

    name = "sparsity"
    summary = "linear layers by 2:4 sparse weights"
    helps = "inference with large linear layers that were pruned to 2:4, on Ampere and later"
    risk = (
        "weights that are sparse already: rounding, and no gain for small layers or few rows; "
        "`prune` makes another model: half of each weight is left out, and nothing trains the rest"
    )
    page = "https://docs.pytorch.org/docs/stable/sparse.html#sparse-semi-structured-tensors"
    on_request = (
        "half of each weight has to be zero, and that is a choice of training: by request only, "
        "and then measured"
    )
    multiples = (16, 16)
    casts = True
    Options = Annotated[
        Literal["auto", True, False, "prune"], Field(description="auto, true, false, prune")
    ]

    def effect_of(self, decision: Decision, facts: Facts) -> Effect:
        """Zeros that are left out change no more than the order of sums."""
        return Effect.CHANGES_MODEL if decision.value == "prune" else Effect.ROUNDING

    def missing_units(self, value: Any, hardware: Hardware, facts: Facts) -> str:
        """Sparse Tensor Cores, torch's kernels for them, and numbers of 16 bits."""
        if has := older_than(SINCE, hardware, facts):
            return f"Sparse Tensor Cores come with compute capability 8.0 (Ampere); {has}"
        if hardware.system == "Windows":
            return "torch has no kernels for it on Windows"
        if facts.precision == "fp32" and not {*HALVES} & {*facts.dtypes}:
            return f"its kernels multiply {' and '.join(HALVES)}: ask for precision: bf16, too"
        return ""

    def about(self, value: Any, facts: Facts) -> str:
        """Which layers; where it prunes, what is given up."""
        number = f"{facts.linears} linear layers"
        if value == "prune":
            return (
                f"{number}, where no gradients are recorded: the two smaller of each four weights "
                "in a row are left out"
            )
        return f"those of {number} whose weights are 2:4 sparse, where no gradients are recorded"

    def fits(self, decision: Decision, weight: torch.Tensor) -> bool:
        """Of such sizes, and sparse unless it is to be pruned."""
        return super().fits(decision, weight) and (
            decision.value == "prune" or is_sparse(weight.detach())
        )

    def none_fits(self, decision: Decision) -> str:
        """Also what makes them so."""
        if decision.value == "prune":
            return super().none_fits(decision)
        return (
            "no linear layer has a weight with two zeros in each four of a row; `sparsity: prune` "
            "leaves out the two smaller ones, which makes another model"
        )

    def maker(self, decision: Decision, target: Target) -> Callable[[Any], Any]:
        """Packed twins; float32 weights in the plan's precision."""
        half = DTYPES.get(target.memo.autocast or "bf16", "bfloat16")
        prune, notes, squares = decision.value == "prune", target.notes, [0.0, 0.0]

        def make(weight: torch.Tensor) -> torch.Tensor | None:
            import torch

            if not prune and not is_sparse(weight):
                return None  # it was written meanwhile: torch's own product is right
            values = pruned(weight) if prune else weight
            if prune:
                squares[0] += float((weight - values).float().square().sum())
                squares[1] += float(weight.float().square().sum())
                notes["sparsity"] = _given_up(*squares)
            in_half = str(weight.dtype).removeprefix("torch.") in HALVES
            return _packed(values if in_half else values.to(getattr(torch, half)))

        return make

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        """torch's own call, which replaces the weights for good."""
        half = DTYPES.get(facts.precision)
        cast = f".to(torch.{half})" if half and "float32" in facts.dtypes else ""
        text = PRUNE if decision.value == "prune" else TAKE
        return Snippet(
            for_good(decision),
            imports=("from torch.sparse import to_sparse_semi_structured",),
            model=tuple(text.format(cast=cast).splitlines()),
        )


def is_sparse(weight: torch.Tensor) -> bool:
    """Whether two of each four in a row are zero, at least."""
    return bool((weight.reshape(-1, 4) != 0).sum(1).max() <= 2)


def pruned(weight: torch.Tensor) -> torch.Tensor:
    """The weight without the two of each four in a row that are smaller by magnitude."""
    groups = weight.reshape(-1, 4)
    smaller = groups.abs().topk(2, largest=False).indices
    return groups.scatter(1, smaller, 0).view(weight.shape)


def _given_up(lost: float, of: float) -> str:
    share = f"{lost / of:.1%}" if of else "nothing"
    return f"half of the weights are left out, and {share} of their squared norm with them"


def _packed(weight: torch.Tensor) -> torch.Tensor:
    """As the kernels take it. That it is a prototype stands among the risks."""
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", PROTOTYPE)
        return torch.sparse.to_sparse_semi_structured(weight.contiguous())

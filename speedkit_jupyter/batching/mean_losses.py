"""What a loss is a mean over, as torch's own loss functions say while they are called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Those whose mean is over what is left of the targets (torch.nn.functional).
MEANS = ("cross_entropy", "nll_loss")
DROPOUT = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout",
           "feature_alpha_dropout")  # fmt: skip


@contextmanager
def watched(still: bool = False) -> Iterator[list[float | None]]:
    """Collects what each mean of a loss function in the block divided by: the targets that are not
    ignored, weighed; None for a sum. Where it is `still`, dropout keeps everything.
    """
    import torch
    from torch.nn import functional
    from torch.overrides import TorchFunctionMode

    means = {getattr(functional, name) for name in MEANS}
    dropout = {getattr(functional, name) for name in DROPOUT}
    found: list[float | None] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if still and function in dropout:
                return args[0] if args else kwargs["input"]
            if still and function is functional.scaled_dot_product_attention:
                kwargs = {**kwargs, "dropout_p": 0.0}
                args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
                if len(args) > 4:
                    kwargs.pop("dropout_p")
            result = function(*args, **kwargs)
            if function in means and torch.is_tensor(result) and not result.ndim:
                found.append(_divisor(args, kwargs))
            return result

    with Watch():
        yield found


def _divisor(args: Any, kwargs: Any) -> float | None:
    """By the formula of torch.nn.CrossEntropyLoss; None for a sum."""
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction",
             "label_smoothing")  # fmt: skip
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    target, weight = given["target"], given.get("weight")
    if given.get("reduction", "mean") != "mean":
        return None
    if target.is_floating_point():  # probabilities of classes
        return float(target.numel() // target.shape[1 if target.ndim > 1 else 0])
    kept = target != given.get("ignore_index", -100)
    if weight is None:
        return float(kept.sum())
    return float(weight[target[kept]].sum())

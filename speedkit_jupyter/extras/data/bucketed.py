"""Pad batches to a few lengths, so that code is compiled once for each length."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from speedkit_jupyter.support import arguments
from speedkit_jupyter.support.exceptions import StepError
from speedkit_jupyter.torchglue.private import tree_leaves, tree_map

# Default padding values of fields that don't hold token ids. Masks get 0, too.
OF_FIELDS = {
    **dict.fromkeys(("labels", "label_ids", "targets"), -100),  # cross-entropy ignores -100
    **dict.fromkeys(("token_type_ids", "position_ids"), 0),  # indices into small tables
}


def bucketed(
    collate_fn: Callable[[Any], Any], lengths: Sequence[int], pad_value: int | Mapping[str, int] = 0
) -> Callable[[Any], Any]:
    """Return a `collate_fn` that pads batches on the right, up to the next of a few lengths.

    The samples and their order stay as they are. The batch's length is the second dimension of its
    first 2-D tensor of integers or booleans; tensors with this second dimension are padded.
    Batches without such a tensor, or longer than all lengths, stay unchanged.

    Args:
        collate_fn: the loader's own function, which pads samples to one length.
        lengths: the lengths to pad to; code is compiled once for each.
        pad_value: the padding value, such as a tokenizer's `pad_token_id`, or values by field
            (others get 0). Unless named, `labels`, `label_ids`, `targets` and tensors with -100 get
            -100, which cross-entropy ignores; masks, `token_type_ids`, `position_ids` get 0.

    Raises:
        StepError: no length is given, one is not a whole number above 0, or a value is not whole.

    Example::

        loader = DataLoader(data, 8, collate_fn=bucketed(collate, (32, 64, 128)))
    """
    if not callable(collate_fn):
        raise StepError(f"collate_fn must be callable, not {type(collate_fn).__name__}")
    listed = lengths if isinstance(lengths, Sequence) else [lengths]
    every = sorted({arguments.whole("lengths", one) for one in listed})
    if not every or every[0] < 1:
        raise StepError(f"lengths must be whole numbers above 0, not {arguments.shown(lengths)}")
    values = dict(pad_value) if isinstance(pad_value, Mapping) else {"": pad_value}
    for value in values.values():
        arguments.whole("pad_value", value)
    return partial(_collated, collate_fn, every, values)


def _collated(
    collate_fn: Callable[[Any], Any], lengths: Sequence[int], values: Mapping[str, int], rows: Any
) -> Any:
    return padded(collate_fn(rows), lengths, values)


def padded(batch: Any, lengths: Sequence[int], values: Mapping[str, int] = OF_FIELDS) -> Any:
    """Return the batch, padded to the next of `lengths`; the same batch if that adds nothing."""
    now = length_of(batch)
    if now is None or (longer := next((one for one in lengths if one >= now), now)) == now:
        return batch

    def grown(value: int | None, tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor) or tensor.dim() < 2 or tensor.shape[1] != now:
            return tensor
        if value is None:  # -100 marks unnamed labels
            usual = 0 if tensor.dtype is torch.bool else values.get("", 0)
            value = -100 if (tensor == -100).any() else usual
        behind = [0, 0] * (tensor.dim() - 2)
        return functional.pad(tensor, (*behind, 0, longer - now), value=value)

    if isinstance(batch, Mapping):
        usual, longer_batch = {**OF_FIELDS, **values}, copy.copy(batch)
        for name, one in batch.items():
            value = usual.get(name, 0 if "mask" in str(name) else None)
            longer_batch[name] = tree_map(partial(grown, value), one)  # type: ignore[index]
        return longer_batch
    return tree_map(partial(grown, None), batch)


def length_of(batch: Any) -> int | None:
    """Return the width of the first 2-D tensor of integers or booleans; None without one."""
    leaves = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    words = (one for one in leaves if isinstance(one, torch.Tensor) and one.dim() == 2)
    return next((one.shape[1] for one in words if not one.is_floating_point()), None)


def keeps_loss(model: torch.nn.Module, batch: Mapping[str, Any], lengths: Sequence[int]) -> bool:
    """Return whether padding changes `loss` in eval mode by at most 0.1 %; False without a loss."""
    modes = {part: part.training for part in model.modules()}
    try:
        model.eval()
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            plain, grown = (
                getattr(model(**one), "loss", None) for one in (batch, padded(batch, lengths))
            )
    finally:
        for part, mode in modes.items():
            part.training = mode
    if plain is None or grown is None:
        return False
    return torch.allclose(plain.float(), grown.float(), rtol=1e-3)


def few_lengths(widths: Sequence[int], most: int = 4) -> tuple[tuple[int, ...], float]:
    """Return up to `most` multiples of 8 that cover `widths`, and the share of padding they add."""
    ordered, numbers = sorted(widths), range(1, most + 1)
    longest = (ordered[math.ceil(len(ordered) * number / most) - 1] for number in numbers)
    lengths = tuple(sorted({math.ceil(one / 8) * 8 for one in longest}))
    grown = sum(next(one for one in lengths if one >= width) for width in widths)
    return lengths, 1 - sum(widths) / grown

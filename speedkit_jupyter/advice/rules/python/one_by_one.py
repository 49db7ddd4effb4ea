"""A model that is asked sample by sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from speedkit_jupyter.advice.gain import Gain, amdahl
from speedkit_jupyter.advice.opportunity import Opportunity
from speedkit_jupyter.advice.rules.base import Rule
from speedkit_jupyter.advice.rules.data.small_batch import grown
from speedkit_jupyter.advice.situation import Situation
from speedkit_jupyter.advice.watched import ModelCall
from speedkit_jupyter.support.words import share

if TYPE_CHECKING:
    pass

LEAST_CALLS, MOST_TRIED = 4, 64


class OneByOne(Rule):
    """Many calls in one step, each with one row of the same shape, none with another's result."""

    name: ClassVar[str] = "one_by_one"

    def find(self, seen: Situation) -> Iterator[Opportunity]:
        """The model is tried with as many rows at once, in turn with one."""
        groups: dict[tuple[int, int], list[ModelCall]] = {}
        for call in seen.watched.of_models():
            groups.setdefault((id(call.module), call.step), []).append(call)
        many = max(groups.values(), key=len, default=[])
        if len(many) < LEAST_CALLS or not _is_one_row_each(many) or _follow_each_other(many):
            return
        times = _faster(seen, many)
        if times is None or times < 1.3:
            return
        part = seen.computing
        around = part + seen.share("rest", "synchronizations")
        if not (at_hand := _were_at_hand(many)):
            around = part
        yield Opportunity(
            self.name,
            f"call {seen.name(many[0].module, 'the model')} once with all rows",
            f"{len(many)} calls in a step, each with one row of shape {_shape(many[0])}; one call "
            f"with {min(len(many), MOST_TRIED)} rows is {times:.1f} times as fast; "
            f"the loop: {share(around)} of the step",
            Gain(amdahl(part, max(times * 0.5, 1.05)).low, amdahl(around, times * 2.0).low),
            "model(torch.stack(rows)) in place of the loop",
            "batch norm in training sees the whole batch"
            if at_hand
            else "only where no row is made of what an earlier call gave (a roll-out's, a text's)",
        )


def _is_one_row_each(calls: list[ModelCall]) -> bool:
    shapes = {tuple(tuple(one.shape) for one in call.inputs) for call in calls}
    if len(shapes) != 1:
        return False
    (inputs,) = shapes
    return bool(inputs) and all(not shape or shape[0] == 1 or len(shape) == 1 for shape in inputs)


def _were_at_hand(calls: list[ModelCall]) -> bool:
    """Whether all rows are parts of the same tensors, which were there before the first call."""
    rows = [[one.untyped_storage().data_ptr() for one in call.inputs] for call in calls]
    return all(row == rows[0] for row in rows)


def _follow_each_other(calls: list[ModelCall]) -> bool:
    """Whether a call gets what an earlier one gave: then they can't be made at once."""
    return any(one.grad_fn is not None for call in calls[1:] for one in call.inputs)


def _shape(call: ModelCall) -> str:
    return "×".join(str(size) for size in call.inputs[0].shape)


def _faster(seen: Situation, calls: list[ModelCall]) -> float | None:
    import torch

    call, rows = calls[0], min(len(calls), MOST_TRIED)
    if any(one.dim() < 2 for one in call.inputs):
        args = tuple(_raised(one) for one in call.args)
    else:
        args = call.args
    many = grown(args, rows), grown(dict(call.kwargs), rows)
    modules = Counter(type(one).__name__ for one in call.module.modules())
    if any("BatchNorm" in name for name in modules) and call.training:
        return None
    seen.settle()
    try:
        with torch.no_grad():
            ratio = seen.ratio(
                lambda: call.module(*call.args, **call.kwargs),
                lambda: call.module(*many[0], **many[1]),
            )
    except Exception:  # a model for one row alone
        return None
    finally:
        seen.settle()
    return None if ratio is None else ratio * rows


def _raised(value: object) -> object:
    import torch

    return value.unsqueeze(0) if isinstance(value, torch.Tensor) else value

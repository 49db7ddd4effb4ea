"""A batch so small that operators cost more than what they compute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from speedkit_jupyter.advice.gain import Gain
from speedkit_jupyter.advice.opportunity import Opportunity
from speedkit_jupyter.advice.rules.base import Rule
from speedkit_jupyter.advice.situation import Situation
from speedkit_jupyter.advice.watched import ModelCall, tensors

if TYPE_CHECKING:
    pass

LEAST_COMPUTING, MOST_ROWS = 0.3, 8
# So many times the batch is tried; it must be this much faster for each sample.
TIMES, LEAST = 4, 2.0


class SmallBatch(Rule):
    """The model is asked once with the batch and once with four of it, in turn."""

    name: ClassVar[str] = "small_batch"

    def find(self, seen: Situation) -> Iterator[Opportunity]:
        """Of the first model that a training step calls, once for each batch."""
        calls = seen.watched.of_models()
        if not (calls and seen.trains) or seen.computing < LEAST_COMPUTING:
            return
        call = calls[0]
        rows = batch_size(call)
        if rows is None or rows > MOST_ROWS or _is_called_by_rows(calls, rows):
            return
        each = _faster(seen, call)
        if each is None or each < LEAST:
            return
        whole = seen.computing + seen.share("optimizer", "rest", "synchronizations")
        yield Opportunity(
            self.name,
            f"take a larger batch than {rows}",
            f"the model takes {TIMES / each:.2f} times as long for {TIMES} times the batch",
            Gain(1 / (1 - whole * (1 - 1 / each) * 0.6), 1 / (1 - whole * (1 - 1 / (2 * each)))),
            f"batch_size={TIMES * rows}, and a learning rate for it: samples a second gain, not "
            "steps",
            "another batch is another training: its learning rate and results differ",
        )


def batch_size(call: ModelCall) -> int | None:
    """The size that the first dimensions of all inputs agree in."""
    sizes = {one.shape[0] for one in call.inputs if one.dim() > 1}
    return sizes.pop() if len(sizes) == 1 else None


def _is_called_by_rows(calls: list[ModelCall], rows: int) -> bool:
    """Which is another rule's matter."""
    return rows == 1 and len(calls) > 4


def _faster(seen: Situation, call: ModelCall) -> float | None:
    """How many times as fast a sample is in the larger batch; None where it can't be said."""
    import torch

    larger = grown(call.args, TIMES), grown(dict(call.kwargs), TIMES)

    def once(args: Any, kwargs: Any) -> None:
        call.module(*args, **kwargs)

    seen.settle()
    try:
        with torch.no_grad():
            ratio = seen.ratio(lambda: once(*larger), lambda: once(call.args, call.kwargs))
    except Exception:  # a model for this batch alone
        return None
    finally:
        seen.settle()
    return None if ratio is None else TIMES / ratio


def grown(value: Any, times: int) -> Any:
    """The same with every tensor's rows repeated."""
    import torch

    if isinstance(value, torch.Tensor):
        return torch.cat([value.detach()] * times) if value.dim() else value
    if isinstance(value, dict):
        return {key: grown(one, times) for key, one in value.items()}
    if isinstance(value, list | tuple) and any(True for _ in tensors(value)):
        return type(value)(grown(one, times) for one in value)
    return value

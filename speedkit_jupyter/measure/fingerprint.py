"""What a step works on, by identity: which objects there are, and in what order and setting.

Values of tensors are compared elsewhere (`State.holds`); those of data only by torch's own count
of changes in place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any

from speedkit_jupyter import flags
from speedkit_jupyter.context import in_force

if TYPE_CHECKING:
    import torch

    from speedkit_jupyter.measure.step import Step

PLAIN = (int, float, complex, str, bytes, bool, type(None), tuple)


class Fingerprint:
    """Taken now; `difference()` says in words what is otherwise by then, or nothing."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._seen = dict(_parts(step))  # holds the objects, so that no address is used again

    def difference(self) -> str:
        """The first thing that differs: `a cell changed the model`."""
        for what, now in _parts(self._step):
            if not _same(self._seen[what], now):
                return what
        return ""


def _parts(step: Step) -> Iterator[tuple[str, list[Any]]]:
    """Beginning with what the others follow from."""
    import torch

    models = [*step.models, *(m for m in step.bystanders if isinstance(m, torch.nn.Module))]
    optimizers = [
        *step.optimizers,
        *(o for o in step.bystanders if isinstance(o, torch.optim.Optimizer)),
    ]
    plans = [in_force(model) for model in step.models]
    yield "a plan was applied or restored", [*plans, *(one.active for one in plans if one)]
    settings = [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), dict(flags.snapshot())]
    yield "a cell changed torch's settings", settings
    yield "a cell changed what the step uses", list(step.reached())
    yield "a cell changed the model", [x for model in models for x in _model(model)]
    yield "a cell changed the optimizer", [x for one in optimizers for x in _optimizer(one)]
    yield "a cell changed what the step uses, in place", [x for o in step.others for x in _of(o)]


def _model(model: torch.nn.Module) -> Iterator[Any]:
    for module in model.modules():
        for holder in (module.__dict__, module._parameters, module._buffers, module._modules):
            if isinstance(holder, dict):  # TorchScript keeps its own in C++
                yield from _of(holder)
        for value in list(module.__dict__.values()):
            if isinstance(value, dict):  # hooks, among others
                yield from _of(value)
    for tensor in (*model.parameters(), *model.buffers()):
        yield tensor.requires_grad
        yield tensor.grad if tensor.is_leaf else None


def _optimizer(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    for group in optimizer.param_groups:
        yield group
        yield from _of(group)
        yield from group["params"]
    for key, state in optimizer.state.items():
        yield key
        yield from _of(state)


def _of(found: Any) -> Iterator[Any]:
    """Its parts, for what has parts; how often it was changed, for a tensor of data."""
    import torch

    if isinstance(found, torch.Tensor):
        yield found
        yield None if found.is_inference() else found._version
    elif isinstance(found, Mapping):
        yield from found.keys()
        yield from found.values()
    elif isinstance(found, list | set | deque):
        yield from list(found)
    elif hasattr(found, "__dict__") and not isinstance(found, type | FunctionType):
        yield from vars(found).values()


def _same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        a is b
        or (isinstance(a, PLAIN) and type(a) is type(b) and a == b)
        or (isinstance(a, dict) and isinstance(b, dict) and a == b)
        for a, b in zip(one, other, strict=True)
    )

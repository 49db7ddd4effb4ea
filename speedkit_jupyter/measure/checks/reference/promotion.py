"""A step in float64: the reference, and what the control rounds in."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure.checks.reference.rounding import of_parameters
from speedkit_jupyter.measure.rounds.confinement import patched
from speedkit_jupyter.support.storage import is_in_memory
from speedkit_jupyter.support.torch_private import is_transformed, tree_leaves, tree_map

if TYPE_CHECKING:
    import torch

# Models with more bytes in a lower dtype are not taken to float64: there they have four times as
# many.
MOST_BYTES = 2**32
# A GradScaler's kernels take their scale in float32, and change it in place.
IN_FLOAT32 = "_amp_"
# About a tensor itself, not its numbers: that gradients are to lead to it (so a penalty, or `vjp`,
# begins), and which memory it has (so it is loaded, or comes from another process).
OF_ITSELF = frozenset(
    [
        "requires_grad_", "retain_grad", "register_hook", "register_post_accumulate_grad_hook",
        "set_", "resize_", "resize_as_", "share_memory_", "untyped_storage", "_typed_storage",
        "storage",
    ]
)  # fmt: skip
# What gives out the memory itself, whose size is another in float64.
OF_MEMORY = frozenset(["untyped_storage", "storage", "_typed_storage"])


def parameters_of(holders: Sequence[Any]) -> list[Any]:
    """Return the parameters of optimizers and models."""
    parameters = []
    for holder in holders:
        if hasattr(holder, "param_groups"):
            parameters += [p for group in holder.param_groups for p in group["params"]]
        elif hasattr(holder, "parameters"):
            parameters += list(holder.parameters())
    return parameters


def is_sharded(parameter: torch.Tensor) -> bool:
    """Return whether it is a part of a distributed tensor, as `fully_shard` makes them."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(parameter, module.DTensor)


@contextmanager
def in_float64(models: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Models in float64, and every tensor of fewer digits that meets them promoted.

    The caller puts parameters and buffers back (their dtype comes with their values). A leaf that
    is in no model is promoted as it is, for its gradient is its own, and put back at the end.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    leaves = _Leaves(models)
    promoted = leaves.promoted
    grad, data = (vars(torch.Tensor.__base__)[name] for name in ("grad", "data"))
    own = (grad.__get__, grad.__set__, grad.__delete__, data.__get__, data.__set__)

    class Promoting(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, classes: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = getattr(function, "__name__", "")
            if name.startswith(IN_FLOAT32):
                return _with_scale_in_float32(function, args)
            if name in OF_MEMORY and id(args[0]) in leaves.widened:
                raise RuntimeError("the step works on the memory of a parameter")
            if name.partition(".")[0] in OF_ITSELF:
                return function(*args, **(kwargs or {}))
            if function in own:  # what is read of a copy is none, and what is set is lost
                return function(*_in_the_dtype_of_the_first(args))
            given = args, kwargs or {}
            now = tree_map(promoted, given)
            if _differentiates(function):  # by those tensors, not by copies of them
                inputs = {name: value for name, value in given[1].items() if name == "inputs"}
                return function(*now[0][:1], *args[1:2], *now[0][2:], **{**now[1], **inputs})
            result = function(*now[0], **now[1])
            if _writes(function) and _handed_back(tree_leaves(given), tree_leaves(now)):
                return args[0] if args and result is now[0][0] else result
            return result

    for model in models:
        for tensor in (*model.parameters(), *model.buffers()):
            if not is_in_memory(tensor):
                raise RuntimeError("the memory of a parameter is given back")
            leaves.promote(tensor)
    try:
        with Promoting():
            yield
    finally:
        leaves.put_back()


@contextmanager
def without_wrappers() -> Iterator[None]:
    """DistributedDataParallel calls its module and reduces nothing: its buckets have a fixed dtype.

    With several processes it stays as it is: the mean of all gradients is the result.
    """
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    def make(forward: Any) -> Any:
        def call(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
            if distributed.get_world_size(wrapper.process_group) > 1:
                return forward(wrapper, *args, **kwargs)
            return wrapper.module(*args, **kwargs)

        return call

    with patched(DistributedDataParallel, "forward", make):
        yield


class _Leaves:
    """What of tensors is promoted: copies of their numbers, and leaves themselves."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        import torch

        low = [p for p in parameters_of(models) if of_parameters([p])]
        small = sum(p.numel() * p.element_size() for p in low) <= MOST_BYTES
        self._dtypes = {torch.float32: torch.float64, torch.complex64: torch.complex128}
        if small:
            self._dtypes |= dict.fromkeys((torch.bfloat16, torch.float16), torch.float64)
        self.widened: set[int] = set()  # by identity: what it is of lives as long
        self._before: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []

    def promoted(self, value: Any) -> Any:
        """Itself, where it has the digits by now; a copy that leads back to it else."""
        import torch

        if not isinstance(value, torch.Tensor) or value.dtype not in self._dtypes:
            return value
        if not is_in_memory(value):
            return value
        if not _can_be_promoted(value):
            return value.to(self._dtypes[value.dtype])
        with torch.DisableTorchFunction(), torch.no_grad():
            self._before.append((value, value.data, value.grad))
            self.promote(value)
        return value

    def promote(self, tensor: torch.Tensor) -> None:
        """The tensor itself."""
        import torch

        gradient = tensor.grad if tensor.is_leaf or tensor.retains_grad else None
        if gradient is not None:
            tensor.grad = None
        if tensor.dtype in self._dtypes:
            tensor.data = tensor.data.to(self._dtypes[tensor.dtype])
            self.widened.add(id(tensor))
        if gradient is not None:  # a step may count on one: its values are of no concern
            tensor.grad = torch.zeros_like(tensor)

    def put_back(self) -> None:
        """The memory that leaves had before, with what it holds, and their gradients."""
        for tensor, data, gradient in reversed(self._before):
            tensor.grad = None
            tensor.data = data
            tensor.grad = gradient


def _can_be_promoted(tensor: torch.Tensor) -> bool:
    """A leaf that gathers a gradient, of memory of its own class."""
    import torch

    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return plain and tensor.requires_grad and tensor.is_leaf and not is_transformed(tensor)


def _in_the_dtype_of_the_first(args: Any) -> Any:
    import torch

    tensor = args[0]
    return [
        value.to(tensor.dtype) if isinstance(value, torch.Tensor) and value is not tensor else value
        for value in args
    ]


def _differentiates(function: Any) -> bool:
    """Whether it is `torch.autograd.grad`, wrapped as it may be."""
    return getattr(function, "__module__", "") == "torch.autograd" and function.__name__ == "grad"


def _writes(function: Any) -> bool:
    """Whether it changes what it is given: `add_`, `__iadd__`, `_foreach_add_`."""
    name = getattr(function, "__name__", "")
    return name.startswith("__i") if name.endswith("__") else name.endswith("_")


def _handed_back(given: Sequence[Any], now: Sequence[Any]) -> bool:
    """What was written into promoted copies: the number of an optimizer's steps, say.

    But for what a gradient leads through, of which the copy goes on.
    """
    import torch

    written = False
    with torch.no_grad():
        for tensor, copy in zip(given, now, strict=True):
            if tensor is copy or not isinstance(tensor, torch.Tensor) or tensor.shape != copy.shape:
                continue
            if not copy.requires_grad:
                value, written = copy.to(tensor.dtype), True
                if not torch.equal(tensor, value):
                    tensor.copy_(value)
    return written


def _with_scale_in_float32(function: Any, args: Any) -> Any:
    """A GradScaler's kernel: gradients stay as they are, what it marks is handed back."""
    import torch

    low = [
        value.float() if isinstance(value, torch.Tensor) and value.dtype is torch.float64 else value
        for value in args[1:]
    ]
    result = function(args[0], *low)
    for value, copy in zip(args[1:], low, strict=True):
        if value is not copy:
            value.copy_(copy)
    return result

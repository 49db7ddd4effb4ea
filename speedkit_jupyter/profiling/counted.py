"""How many operations and bytes a call takes: each operator, in which module, in which pass."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from speedkit_jupyter.measure.checks.roofline import eager
from speedkit_jupyter.profiling.module_calls import ModuleCalls
from speedkit_jupyter.profiling.traced import Place
from speedkit_jupyter.support import torch_private

# These read no more of a table than they give.
LOOKUPS = ("aten::embedding", "aten::index_select", "aten::index", "aten::gather")
# And these write nothing yet.
EMPTY = ("aten::empty", "aten::new_empty")


class Work(NamedTuple):
    """One call of an operator, and the dtype that it computes in."""

    place: Place
    dtype: Any
    flops: int
    moved_bytes: int


def counted(call: Callable[[], object], modules: ModuleCalls) -> Counter[Work]:
    """Count what a call does.

    Operations are those that torch's formulas know (`torch.utils.flop_counter`): matrix products,
    convolutions, attention. Bytes are the tensors that are read and written. Compiled code runs as
    plain PyTorch.
    """
    from torch.utils.flop_counter import flop_registry

    found = Counter[Work]()

    class Counting(torch_private.dispatch_mode()):  # type: ignore[misc]
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            packet = getattr(function, "_overloadpacket", None)
            if packet is None:  # an operator of a higher order, which calls others
                return function(*args, **kwargs)
            if packet not in flop_registry:
                with self:
                    parts = function.decompose(*args, **kwargs)
                if parts is not NotImplemented:
                    return parts
            result = function(*args, **kwargs)
            formula = flop_registry.get(packet)
            flops = 0 if formula is None else int(formula(*args, **kwargs, out_val=result))
            read, given = _tensors((args, kwargs)), _tensors(result)
            moved = _moved_bytes(function._schema, read, given)
            if flops or moved:
                place = Place(*_whose(modules), function._schema.name)
                dtypes = (t.dtype for t in (*read, *given) if t.dtype.is_floating_point)
                found[Work(place, next(dtypes, None), flops, moved)] += 1
            return result

    with eager(), modules.followed(), Counting():
        call()
    return found


def _whose(modules: ModuleCalls) -> tuple[str, bool]:
    """Return the module, and whether it is the backward pass."""
    node = torch_private.current_node()
    if node is None:
        return modules.here, False
    return modules.here or modules.of_node(node._sequence_nr()), True


def _tensors(values: Any) -> list[Any]:
    import torch

    return [value for value in torch_private.tree_leaves(values) if isinstance(value, torch.Tensor)]


def _moved_bytes(schema: Any, read: list[Any], given: list[Any]) -> int:
    """Read and written; a view of another tensor moves nothing."""
    if schema.name.startswith(EMPTY):
        return 0
    if schema.is_mutable:
        # Of a list of parameters, gradients and state it is not known which ones are written.
        return 2 * sum(map(_bytes, _each_once(read)))
    places = {_place_in_memory(tensor) for tensor in read}
    new = [tensor for tensor in given if _place_in_memory(tensor) not in places]
    written = sum(map(_bytes, _each_once(new)))
    if not written and given:
        return 0
    most = written if schema.name in LOOKUPS else math.inf
    return written + int(sum(min(_bytes(tensor), most) for tensor in _each_once(read)))


def _each_once(tensors: Iterable[Any]) -> list[Any]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _place_in_memory(tensor: Any) -> int:
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (NotImplementedError, RuntimeError):  # sparse, or another kind without storage
        return id(tensor)


def _bytes(tensor: Any) -> int:
    """Return the size of the elements that there are: fewer than its shape says, if expanded."""
    size = int(tensor.numel() * tensor.element_size())
    try:
        return min(size, int(tensor.untyped_storage().nbytes()))
    except (NotImplementedError, RuntimeError):
        return size

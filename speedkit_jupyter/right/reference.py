"""The reference: a step in float64, with the same random draws as in every other precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from speedkit_jupyter.step.memory import size, state_tensors
from speedkit_jupyter.torchglue.confinement import patched
from speedkit_jupyter.torchglue.private import (
    GRAD_SCALER,
    dispatch_mode,
    operator_schema,
    tree_leaves,
    tree_map,
)
from speedkit_jupyter.torchglue.storage import is_in_memory

# A GradScaler's kernels take their scale in float32.
IN_FLOAT32 = GRAD_SCALER
# Kernels that draw inside, where no other draw can be put in their place.
DRAWING_KERNELS = ("scaled_dot_product", "rnn", "attention")


def parameters_of(holders: Sequence[Any]) -> list[Any]:
    """Return the parameters of optimizers and models."""
    parameters = []
    for holder in holders:
        parameters += [p for group in getattr(holder, "param_groups", ()) for p in group["params"]]
        parameters += holder.parameters() if hasattr(holder, "parameters") else []
    return parameters


def each_operation(make: Callable[[Any, Any, Any], Any]) -> AbstractContextManager[Any]:
    """Make every operation of the block by `make(operation, args, kwargs)`."""

    class Mode(dispatch_mode()):  # type: ignore[misc]
        def __torch_dispatch__(
            self, operation: Any, kinds: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return make(operation, args, kwargs or {})

    return Mode()


def name_of(operation: Any) -> str:
    """Return `addmm` for `aten::addmm.out`."""
    return str(operator_schema(operation).name.partition("::")[2])


def _wider() -> dict[torch.dtype, torch.dtype]:
    low = dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), torch.float64)
    return low | {torch.complex64: torch.complex128}


@contextmanager
def in_float64(holders: Sequence[Any], steps: bool = True) -> Iterator[None]:
    """Have models and optimizers in float64, and every tensor of fewer digits that meets them.

    The state of optimizers stays as it is if no step of theirs is to come.

    Their tensors get the memory back that they had; gradients that the block makes are the
    caller's to remove. Raises RuntimeError where they are too large, or not in memory.
    """

    def call_wide(call: Any) -> Any:  # some layers check their inputs' dtype themselves
        return lambda module, *args, **kwargs: call(
            module, *_wide(args), **{name: _wide(value) for name, value in kwargs.items()}
        )

    models = [one for one in holders if hasattr(one, "buffers")]
    optimizers = [one for one in holders if hasattr(one, "param_groups")]
    tensors = [*parameters_of(optimizers), *state_tensors(models, optimizers if steps else ())]
    if not all(map(is_in_memory, tensors)):
        raise RuntimeError("the memory of a parameter is given back")
    held = {id(t): t for t in tensors if t.dtype in _wider() and t.layout is torch.strided}
    # In float64 a lower dtype has four times as many bytes: 16 GiB from 4.
    if size(t for t in held.values() if t.element_size() == 2) > 2**32:
        raise RuntimeError("the model is too large for float64")
    before = [(tensor, tensor.data) for tensor in held.values() if tensor.dim()]
    try:
        for tensor, data in before:
            tensor.data = data.to(_wider()[data.dtype])
        with patched(torch.nn.Module, "__call__", call_wide), each_operation(_promote):
            yield
    finally:
        for tensor, data in before:
            tensor.data = data


def _wide(value: Any) -> Any:
    """Return a tensor in float64, or a tuple; other containers may be there to be written into."""
    if type(value) is tuple:
        return tuple(map(_wide, value))
    if not isinstance(value, torch.Tensor) or value.dtype not in _wider():
        return value
    return value.to(_wider()[value.dtype]) if is_in_memory(value) else value


def _promote(operation: Any, args: Any, kwargs: Any) -> Any:
    """Make an operation of several dtypes in the widest one."""
    given, name = tree_leaves((args, kwargs)), name_of(operation)
    dtypes = {value.dtype for value in given if isinstance(value, torch.Tensor)}
    is_mixed = dtypes & {torch.float64, torch.complex128} and dtypes & _wider().keys()
    if not is_mixed or name.startswith(IN_FLOAT32) or name == "copy_":
        return operation(*args, **kwargs)
    copies = {id(value): _wide(value) for value in given}
    args, kwargs = tree_map(lambda value: copies.get(id(value), value), (args, kwargs))
    result = operation(*args, **kwargs)
    for value in (
        given if operator_schema(operation).is_mutable else ()
    ):  # what was written into a copy
        copy = copies[id(value)]
        if copy is not value and value.shape == copy.shape:
            value.copy_(copy)
            result = value if result is copy else result
    return result


def without_wrappers() -> AbstractContextManager[None]:
    """Let DistributedDataParallel reduce nothing: its buckets have a fixed dtype."""
    from torch.nn.parallel import DistributedDataParallel as Wrapper

    return patched(Wrapper, "forward", lambda _: lambda ddp, *args, **kw: ddp.module(*args, **kw))


# Random draws.


def replayed(drawn: set[str]) -> AbstractContextManager[Any]:
    """Make every draw from torch's generators in float32, in contiguous memory: the same numbers
    in float64, bf16 and channels_last. `drawn` gets the names of the operations that drew.
    """

    def make(operation: Any, args: Any, kwargs: Any) -> Any:
        if torch.Tag.nondeterministic_seeded not in operation.tags:
            return operation(*args, **kwargs)
        name = name_of(operation)
        if not draws_inside(name):
            drawn.add(name)
            return _drawn(operation, args, kwargs)
        names = [argument.name for argument in operator_schema(operation).arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if given.get("dropout_p") or given.get("dropout"):  # said to draw, and mostly does not
            drawn.add(name)
        return operation(*args, **kwargs)

    return each_operation(make)


def draws_inside(name: str) -> bool:
    """Return whether an operation of this name draws inside a kernel of its own."""
    return any(part in name for part in DRAWING_KERNELS)


def _drawn(operation: Any, args: Any, kwargs: Any) -> Any:
    """Return the operation on float32 copies, its result in the dtype that was asked for."""
    floats = [v for v in args if isinstance(v, torch.Tensor) and v.is_floating_point()]
    asked = kwargs.get("dtype") or (floats[0].dtype if floats else None)
    if kwargs.get("dtype") is not None and kwargs["dtype"].is_floating_point:
        kwargs = {**kwargs, "dtype": torch.float32}
    plain = [_in_float32(value) for value in args]
    result = operation(*plain, **{name: _in_float32(value) for name, value in kwargs.items()})
    if args and operator_schema(operation).name.endswith("_"):  # in place
        return args[0].copy_(plain[0])
    if isinstance(result, tuple):  # native_dropout: the numbers keep their precision
        return args[0] * result[1] / max(1 - args[1], 1e-9), result[1]
    is_float = isinstance(result, torch.Tensor) and result.is_floating_point()
    return result.to(asked) if is_float and asked is not None else result


def _in_float32(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    if not is_in_memory(value):  # only its shape is asked for
        return torch.empty_like(value, dtype=torch.float32)
    return value.detach().to(torch.float32, memory_format=torch.contiguous_format, copy=True)


@contextmanager
def without_dropout(models: Sequence[torch.nn.Module]) -> Iterator[bool]:
    """Switch dropout layers off, since each kernel draws other masks; yield whether any was on."""
    dropouts: Any = torch.nn.Dropout.__base__
    kinds = (dropouts, torch.nn.MultiheadAttention, torch.nn.RNNBase)
    layers: list[tuple[Any, str, float]] = []
    for module in (part for model in models for part in model.modules()):
        name = "p" if isinstance(module, dropouts) else "dropout"
        if isinstance(module, kinds) and getattr(module, name) and module.training:
            layers.append((module, name, getattr(module, name)))
            setattr(module, name, 0.0)
    try:
        yield bool(layers)
    finally:
        for module, name, value in layers:
            setattr(module, name, value)

"""Run a step in other arithmetic: in float64 as a reference, or with added rounding errors.

A run with added rounding errors is a control: it shows how a dtype's rounding changes each tensor.
Most controls add random errors of up to one rounding error (Monte Carlo arithmetic: Parker, UCLA
CSD-970002, 1997), which also affect sums that cancel by symmetry. The second control rounds to
nearest (Veltkamp's splitting: Dekker, Numerische Mathematik 18, 1971): equal numbers stay equal.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from speedkit_jupyter.step.memory import size, state_tensors
from speedkit_jupyter.torchglue import private
from speedkit_jupyter.torchglue.confinement import patched
from speedkit_jupyter.torchglue.storage import is_in_memory

# Bits of the significand, including the hidden bit; the unit roundoff is 2**-bits.
DIGITS = {"fp32": 24, "tf32": 11, "fp16": 11, "bf16": 8}
LOW: dict[object, str] = {torch.bfloat16: "bf16", torch.float16: "fp16"}
WIDER = {
    **dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), torch.float64),
    torch.complex64: torch.complex128,
}
# Number of random numbers, which are drawn once and reused. It is prime, so that rows or columns of
# a tensor get different numbers.
STOCK = 262_147
# Pattern for the names of operations that autocast runs in the lower precision.
PRODUCTS = re.compile(
    r"(^|_)(mm|bmm|addmm|baddbmm|addbmm|mv|addmv|dot|linear|rnn|lstm_cell|gru_cell)(_|$)"
    r"|convolution|attention|transformer_encoder"
)
# Operations whose result has the first operand's dtype; weights and statistics stay in float32.
BY_FIRST_OPERAND = ("norm", "where", "prelu")
# Operations without arithmetic: like views and random draws, their results are not rounded.
COPIES = ("detach", private.CAST, "lift_fresh", "alias")


def unit(precision: str) -> float:
    """Return the largest relative error of one rounding."""
    return 2.0 ** -DIGITS[precision]


def lowest(*precisions: str) -> str:
    """Return the precision with the fewest bits; fp32 if none is given."""
    return max(("fp32", *precisions), key=unit)


def of_dtypes(dtypes: Iterable[object]) -> set[str]:
    """Return the names of the 16-bit precisions among the dtypes."""
    return {LOW[dtype] for dtype in dtypes if dtype in LOW}


def parameters_of(holders: Sequence[Any]) -> list[Any]:
    parameters = []
    for holder in holders:
        parameters += [p for group in getattr(holder, "param_groups", ()) for p in group["params"]]
        parameters += holder.parameters() if hasattr(holder, "parameters") else []
    return parameters


def each_operation(make: Callable[[Any, Any, Any], Any]) -> AbstractContextManager[Any]:
    """Return a context manager that calls `make(operation, args, kwargs)` for each operation."""

    class Mode(private.dispatch_mode()):  # type: ignore[misc]
        def __torch_dispatch__(
            self, operation: Any, kinds: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return make(operation, args, kwargs or {})

    return Mode()


def _name_of(operation: Any) -> str:
    """Return an operation's short name: `addmm` for `aten::addmm.out`."""
    return str(private.operator_schema(operation).name.partition("::")[2])


# The reference.


@contextmanager
def in_float64(holders: Sequence[Any], steps: bool = True) -> Iterator[None]:
    """Compute in float64 inside the block, with the models and optimizers in `holders`.

    Module inputs, and operands next to float64 operands, are converted, too. Optimizer state is
    converted only with `steps`. After the block, the converted tensors have their original memory;
    the caller must remove gradients. Raises RuntimeError if 16-bit tensors take over 4 GiB, or if
    a tensor's memory is released.
    """

    def call_wide(call: Any) -> Any:  # some layers check the dtype of inputs themselves
        return lambda module, *args, **kwargs: call(
            module, *_wide(args), **{name: _wide(value) for name, value in kwargs.items()}
        )

    models = [one for one in holders if hasattr(one, "buffers")]
    optimizers = [one for one in holders if hasattr(one, "param_groups")]
    tensors = [*parameters_of(optimizers), *state_tensors(models, optimizers if steps else ())]
    if not all(map(is_in_memory, tensors)):
        raise RuntimeError("a parameter's memory is released")
    held = {id(t): t for t in tensors if t.dtype in WIDER and t.layout is torch.strided}
    # float64 takes four times the bytes of a 16-bit dtype: 16 GiB instead of 4 GiB.
    if size(t for t in held.values() if t.element_size() == 2) > 2**32:
        raise RuntimeError("the model is too large for float64")
    before = [(tensor, tensor.data) for tensor in held.values() if tensor.dim()]
    try:
        for tensor, data in before:
            tensor.data = data.to(WIDER[data.dtype])
        with patched(torch.nn.Module, "__call__", call_wide), each_operation(_promote):
            yield
    finally:
        for tensor, data in before:
            tensor.data = data


def _wide(value: Any) -> Any:
    """Return a tensor or tuple in float64; keep lists and dicts, which modules may write to."""
    if type(value) is tuple:
        return tuple(map(_wide, value))
    if not isinstance(value, torch.Tensor) or value.dtype not in WIDER:
        return value
    return value.to(WIDER[value.dtype]) if is_in_memory(value) else value


def _promote(operation: Any, args: Any, kwargs: Any) -> Any:
    given, name = private.tree_leaves((args, kwargs)), _name_of(operation)
    dtypes = {value.dtype for value in given if isinstance(value, torch.Tensor)}
    is_mixed = dtypes & {torch.float64, torch.complex128} and dtypes & WIDER.keys()
    # A GradScaler's kernels need the scale in float32; `copy_` converts by itself.
    if not is_mixed or name.startswith(private.GRAD_SCALER) or name == "copy_":
        return operation(*args, **kwargs)
    copies = {id(value): _wide(value) for value in given}
    args, kwargs = private.tree_map(lambda value: copies.get(id(value), value), (args, kwargs))
    result = operation(*args, **kwargs)
    if not private.operator_schema(operation).is_mutable:
        return result
    for value in given:  # the operation may have written to a copy
        copy = copies[id(value)]
        if copy is not value and value.shape == copy.shape:
            value.copy_(copy)
            result = value if result is copy else result
    return result


def without_wrappers() -> AbstractContextManager[None]:
    """Bypass DistributedDataParallel in the block, because DDP's buckets have a fixed dtype."""
    from torch.nn.parallel import DistributedDataParallel as Wrapper

    return patched(Wrapper, "forward", lambda _: lambda ddp, *args, **kw: ddp.module(*args, **kw))


# Random draws.


def replayed(drawn: set[str]) -> AbstractContextManager[Any]:
    """Return a context manager in which torch draws random numbers as contiguous float32.

    Equal seeds then give equal numbers in float64, bf16 and channels_last, except inside fused
    kernels (see `draws_inside`). The names of operations that draw are added to `drawn`.
    """

    def make(operation: Any, args: Any, kwargs: Any) -> Any:
        if torch.Tag.nondeterministic_seeded not in operation.tags:
            return operation(*args, **kwargs)
        name = _name_of(operation)
        if not draws_inside(name):
            drawn.add(name)
            return _drawn(operation, args, kwargs)
        names = [argument.name for argument in private.operator_schema(operation).arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if given.get("dropout_p") or given.get("dropout"):  # draws only with dropout
            drawn.add(name)
        return operation(*args, **kwargs)

    return each_operation(make)


def draws_inside(name: str) -> bool:
    """Return whether an operation may draw inside its kernel, where draws can't be replaced."""
    return any(part in name for part in ("scaled_dot_product", "rnn", "attention"))


def _drawn(operation: Any, args: Any, kwargs: Any) -> Any:
    """Draw with float32 copies of the operands; return the result in the expected dtype."""
    floats = [v for v in args if isinstance(v, torch.Tensor) and v.is_floating_point()]
    asked = kwargs.get("dtype") or (floats[0].dtype if floats else None)
    if kwargs.get("dtype") is not None and kwargs["dtype"].is_floating_point:
        kwargs = {**kwargs, "dtype": torch.float32}
    plain = [_in_float32(value) for value in args]
    result = operation(*plain, **{name: _in_float32(value) for name, value in kwargs.items()})
    if args and private.operator_schema(operation).name.endswith("_"):  # an in-place operation
        return args[0].copy_(plain[0])
    if isinstance(result, tuple):  # native_dropout: apply the mask in the input's dtype
        return args[0] * result[1] / max(1 - args[1], 1e-9), result[1]
    is_float = isinstance(result, torch.Tensor) and result.is_floating_point()
    return result.to(asked) if is_float and asked is not None else result


def _in_float32(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    if not is_in_memory(value):  # only its shape is used
        return torch.empty_like(value, dtype=torch.float32)
    return value.detach().to(torch.float32, memory_format=torch.contiguous_format, copy=True)


@contextmanager
def without_dropout(models: Sequence[torch.nn.Module]) -> Iterator[bool]:
    """Disable dropout in the block, because kernels draw different masks; yield if any was on."""
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


# The control.


@contextmanager
def noted_autocast() -> Iterator[set[str]]:
    """Yield a set that gets the 16-bit precisions of autocast contexts entered in the block."""
    from torch.amp.autocast_mode import autocast

    precisions: set[str] = set()

    def make(enter: Any) -> Any:
        def entered(self: Any) -> Any:
            precisions.update(of_dtypes([private.autocast_dtype(self)]))
            return enter(self)

        return entered

    with patched(autocast, "__enter__", make):
        yield precisions


def rounded(precision: str, number: int = 0, loss_scale: float = 1) -> AbstractContextManager[None]:
    """Round matrix products, and results computed from them, to `precision` in the block.

    With fp32, all results are rounded, to 20 bits. If `number` is 1, round to nearest, otherwise at
    random. With fp16, also add noise of up to half the smallest subnormal; in backward passes, this
    noise is divided by `loss_scale`.
    """
    return each_operation(_Rounding(precision, number, loss_scale).make)


class _Rounding:
    """Change numbers by up to one rounding error; record which tensors are in low precision."""

    def __init__(self, precision: str, number: int, loss_scale: float) -> None:
        self._everything = precision == "fp32"
        # Fewer than float32's 24 bits, because kernels round more often than once per operation.
        self._digits = 20 if self._everything else DIGITS[precision]
        self._smallest = 2.0**-25 if precision == "fp16" else 0.0  # half the smallest subnormal
        self._to_nearest, self._loss_scale = number == 1, loss_scale
        self._stock: dict[Any, torch.Tensor] = {}
        self._place = random.Random(number)  # separate from the user's generator
        self._lowered: set[int] = set()  # memory addresses of tensors in the lower precision
        self._in_backward = False

    def make(self, operation: Any, args: Any, kwargs: Any) -> Any:
        was_in_backward, self._in_backward = self._in_backward, private.current_node() is not None
        if was_in_backward and not self._in_backward:  # gradients have the parameters' dtype
            self._lowered.clear()
        name = _name_of(operation).rstrip("_")
        draws = torch.Tag.nondeterministic_seeded in operation.tags
        product = not draws and bool(PRODUCTS.search(name))
        if product and not self._everything and not private.operator_schema(operation).is_mutable:
            args = private.tree_map(lambda one: self._rounded(one) if _is_dense(one) else one, args)
        result = operation(*args, **kwargs)
        if operation.is_view:
            return result
        low = product or self._is_low(name, args)
        for tensor in _tensors([result]):
            if low and not draws and name not in COPIES and tensor.dim():  # 0-d losses stay float32
                tensor.copy_(self._rounded(tensor))
            address = tensor.untyped_storage().data_ptr()
            (self._lowered.add if low else self._lowered.discard)(address)
        return result

    def _is_low(self, name: str, args: Any) -> bool:
        """Return whether all tensor operands are in low precision; for fp32, whether any exist."""
        tensors = [tensor for tensor in _tensors(args) if tensor.dim() or tensor.numel() > 1]
        if any(part in name for part in BY_FIRST_OPERAND):
            tensors = tensors[:1]
        lowered = (tensor.untyped_storage().data_ptr() in self._lowered for tensor in tensors)
        return bool(tensors) and (self._everything or all(lowered))

    def _rounded(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._to_nearest:
            own = 24 if tensor.dtype is torch.float32 else 53
            large = tensor * (2.0 ** (own - self._digits) + 1)
            moved = large - (large - tensor)
        else:
            moved = torch.addcmul(tensor, tensor, self._noise(tensor), value=2.0**-self._digits)
        if self._smallest:
            smallest = self._smallest / (self._loss_scale if self._in_backward else 1.0)
            moved.addcmul_(self._noise(tensor), (tensor != 0).to(tensor.dtype), value=smallest)
        if moved.sum().isfinite():  # far cheaper than a test of each element
            return moved
        # Keep elements that would become infinite, such as masks filled with `torch.finfo().min`.
        return torch.where(moved.isfinite(), moved, tensor)

    def _noise(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return random numbers from -1 to 1 in the tensor's shape, from a cached stock."""
        begin, count = self._place.randrange(STOCK), tensor.numel()
        stock = self._stock.get(key := (tensor.device, tensor.dtype))
        if stock is None:
            generator = torch.Generator(tensor.device).manual_seed(0)
            stock = torch.empty(STOCK, device=tensor.device, dtype=tensor.dtype)
            self._stock[key] = stock = stock.uniform_(-1, 1, generator=generator)
        if len(stock) < begin + count:  # repeat it, and cache it for the next large tensor
            self._stock[key] = stock = stock[:STOCK].repeat((begin + count - 1) // STOCK + 1)
        return stock[begin : begin + count].view(tensor.shape)


def _is_dense(value: Any) -> bool:
    is_tensor = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return is_tensor and value.dtype in (torch.float32, torch.float64)


def _tensors(values: Any) -> list[torch.Tensor]:
    """Return the float32 and float64 tensors in nested values; for sparse tensors, their values."""
    leaves = [one for one in private.tree_leaves(values) if isinstance(one, torch.Tensor)]
    for at, tensor in enumerate(leaves):
        if tensor.layout is torch.sparse_coo:
            leaves[at] = private.coo_parts(tensor)[1]
        elif str(tensor.layout).startswith("torch.sparse_"):  # compressed sparse layouts
            leaves[at] = tensor.values()
    return list(filter(_is_dense, leaves))

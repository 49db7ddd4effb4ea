"""Random draws that are the same in every precision and layout, and layers that draw none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.machines import devices
from speedkit_jupyter.support.storage import is_in_memory
from speedkit_jupyter.support.torch_private import dispatch_mode

if TYPE_CHECKING:
    import torch


@contextmanager
def replayed() -> Iterator[list[str]]:
    """Every draw from torch's generators is made in float32, in contiguous memory.

    So a generator that starts from the same state gives the same numbers in float64, bf16 and
    channels_last. Yields the names of the operations that drew inside a kernel of their own, where
    that can't be had. Compiled code draws its own numbers.
    """
    import torch

    beyond: list[str] = []

    class Replaying(dispatch_mode()):  # type: ignore[misc]
        def __torch_dispatch__(
            self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if torch.Tag.nondeterministic_seeded not in function.tags:
                return function(*args, **kwargs)
            name = function._schema.name.partition("::")[2]
            if name == "native_dropout":
                return _dropout(*args, **kwargs)
            if "scaled_dot_product" in name or "rnn" in name or "attention" in name:
                before = states()
                result = function(*args, **kwargs)
                if _drops(function, args, kwargs) or not alike(before, states()):
                    beyond.append(name)
                return result
            return _drawn(function, args, kwargs)

    with Replaying():
        yield beyond


def states() -> list[torch.Tensor]:
    """Of torch's generators, those of accelerators in use with them."""
    import torch

    tensors = [torch.get_rng_state()]
    for kind in devices.in_use():
        states = kind.generators()[0]()
        tensors += states if isinstance(states, list) else [states]
    return tensors


def alike(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether nothing was drawn between the two."""
    import torch

    return len(ones) == len(others) and all(map(torch.equal, ones, others))


def _drops(function: Any, args: Sequence[Any], kwargs: Any) -> bool:
    """Whether it was asked for dropout: what is said to draw mostly does not."""
    names = [argument.name for argument in function._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return any(given.get(name, 0.0) > 0 for name in ("dropout_p", "dropout"))


def _drawn(function: Any, args: Any, kwargs: Any) -> Any:
    """The operation on float32 copies, its result in the dtype that was asked for."""
    import torch

    asked = kwargs.get("dtype")
    if asked is not None and asked.is_floating_point:
        kwargs = {**kwargs, "dtype": torch.float32}
    plain = [_plain(value) for value in args]
    result = function(*plain, **{name: _plain(value) for name, value in kwargs.items()})
    first = args[0] if args and isinstance(args[0], torch.Tensor) else None
    if first is not None and function._schema.name.endswith("_"):  # in place
        return first.copy_(plain[0])
    if not isinstance(result, torch.Tensor) or not result.is_floating_point():
        return result
    if asked is None and first is not None and function._schema.name.endswith(("_like",)):
        asked = first.dtype
    if asked is None:
        dtypes = [o.dtype for o in args if isinstance(o, torch.Tensor) and o.is_floating_point()]
        asked = dtypes[0] if dtypes else result.dtype
    return result.to(asked)


def _plain(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor) and value.is_floating_point():
        if not is_in_memory(value):  # only its shape is asked for
            return torch.empty_like(value, dtype=torch.float32)
        return value.detach().to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    return value


def _dropout(given: Any, p: float, train: bool | None = None) -> Any:
    """The mask is drawn; what it is multiplied with keeps its precision."""
    import torch

    if train is False or p == 0:
        return given.clone(), torch.ones_like(given, dtype=torch.bool)
    drawn = torch.rand(given.shape, device=given.device) >= p
    return given * drawn / (1 - p) if p < 1 else torch.zeros_like(given), drawn


@contextmanager
def without_dropout(models: Sequence[torch.nn.Module]) -> Iterator[bool]:
    """Dropout layers off for the block, since each kernel draws other masks; yields if any was."""
    import torch

    dropouts: Any = torch.nn.Dropout.__base__
    layers: list[tuple[Any, str, float]] = []
    for module in (part for model in models for part in model.modules()):
        name = "p" if isinstance(module, dropouts) else "dropout"
        kinds = (dropouts, torch.nn.MultiheadAttention, torch.nn.RNNBase)
        if isinstance(module, kinds) and getattr(module, name) and module.training:
            layers.append((module, name, getattr(module, name)))
            setattr(module, name, 0.0)
    try:
        yield bool(layers)
    finally:
        for module, name, value in layers:
            setattr(module, name, value)

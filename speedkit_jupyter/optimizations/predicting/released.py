"""What comes out of `torch.inference_mode()` as tensors like any others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.support.exceptions import SpeedKitError

if TYPE_CHECKING:
    import torch

NO_BACKWARD = (
    "the step trains: a backward pass can't go through a model that `inference` is in force on; "
    "ctx.restore() or `%speedkit restore` takes it away"
)


def released(value: Any, guarded: bool = False) -> Any:
    """The same result with tensors that autograd takes, in the memory where they lie.

    Containers and objects that hold tensors stay the same ones, but for tuples. Where it is
    `guarded` they have a gradient to come, as without inference mode; asking for it raises
    SpeedKitError with what to do.
    """
    return _Walk(_guarded if guarded else _plain).of(value)


def release_state(model: torch.nn.Module) -> None:
    """What the modules kept of such calls on themselves: attributes and buffers."""
    walk = _Walk(_plain)
    for part in model.modules():
        for holder in (part._buffers, part.__dict__):
            for name, value in list(holder.items()):
                if name not in ("_parameters", "_buffers", "_modules"):
                    holder[name] = walk.of(value)


class _Walk:
    """Goes through lists, tuples, dicts and plain objects, each once."""

    def __init__(self, release: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._release = release
        self._seen: dict[int, Any] = {}

    def of(self, value: Any) -> Any:
        """The value, or what takes its place."""
        import torch

        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if id(value) in self._seen or isinstance(value, torch.nn.Module | type):
            return value
        if isinstance(value, tuple):
            return self._tuple(value)
        if isinstance(value, list | dict) or _is_plain(value):
            self._seen[id(value)] = value
            for holder, name, part in _contents(value):
                now = self.of(part)
                if now is not part:
                    with suppress(TypeError, AttributeError):  # one that can't be written to
                        holder[name] = now
        return value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_inference():
            return tensor
        if id(tensor) not in self._seen:
            self._seen[id(tensor)] = self._release(tensor), tensor  # whose id stays its own
        return self._seen[id(tensor)][0]  # type: ignore[no-any-return]

    def _tuple(self, value: tuple[Any, ...]) -> tuple[Any, ...]:
        parts = [self.of(part) for part in value]
        if all(now is part for now, part in zip(parts, value, strict=True)):
            return value
        make = getattr(type(value), "_make", type(value))
        try:
            return make(parts)  # type: ignore[no-any-return]
        except TypeError:
            return value


def _contents(value: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Each holder with the key and what it holds."""
    if isinstance(value, list):
        yield from ((value, number, part) for number, part in enumerate(value))
    if isinstance(value, dict):
        yield from ((value, key, part) for key, part in list(value.items()))
    if hasattr(value, "__dict__"):
        attributes = value.__dict__
        yield from ((attributes, name, part) for name, part in list(attributes.items()))


def _is_plain(value: Any) -> bool:
    """An object of a class that someone wrote to hold things."""
    own = hasattr(value, "__dict__") and not callable(value)
    return own and type(value).__module__.partition(".")[0] not in ("torch", "builtins")


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that autograd takes, in the same memory where that is possible."""
    import torch

    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or _is_lent(tensor):
        return tensor.clone()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )


def _is_lent(tensor: torch.Tensor) -> bool:
    return tensor.is_conj() or tensor.is_neg() or tensor.device.type == "meta"


def _guarded(tensor: torch.Tensor) -> torch.Tensor:
    plain = _plain(tensor)
    if not (plain.is_floating_point() or plain.is_complex()):
        return plain
    guard, handle = _guard()
    return guard.apply(plain, handle)  # type: ignore[no-any-return]


@cache
def _guard() -> tuple[Any, torch.Tensor]:
    """The function, and a tensor that makes its result one with a gradient to come."""
    import torch

    class Guard(torch.autograd.Function):
        """Passes its first argument on."""

        @staticmethod
        def forward(ctx: Any, value: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
            return _plain(value)  # no view of what is given, so that it can be written to

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            raise SpeedKitError(NO_BACKWARD)

    with torch.inference_mode(False):
        return Guard, torch.empty(0, requires_grad=True)

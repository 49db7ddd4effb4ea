"""What is passed to a call, in a form that it can be made again with: as it was before the call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from enum import Enum
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


class _At(NamedTuple):
    """Stands for one of the tensors."""

    number: int


class Passed:
    """Arguments taken apart: `tensors`, each once, and an outline of all the rest.

    An object that a call may write to, such as a cache of keys and values, is copied with what it
    is made of; tensors inside of it stay the same ones.
    """

    def __init__(self, args: Any, kwargs: Any) -> None:
        self.tensors: list[torch.Tensor] = []
        numbers: dict[int, _At] = {}

        def number(tensor: torch.Tensor) -> _At:
            if id(tensor) not in numbers:
                numbers[id(tensor)] = _At(len(self.tensors))
                self.tensors.append(tensor)
            return numbers[id(tensor)]

        self._outline = _Copy(number).of((args, kwargs))

    def again(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, Any]:
        """The arguments of one more such call, with these tensors."""
        args, kwargs = _Copy(None, tensors).of(self._outline)
        return args, kwargs


class _Copy:
    """A copy of everything but tensors; of these one of `tensors`, or what `number` gives it."""

    def __init__(
        self,
        number: Callable[[torch.Tensor], _At] | None,
        tensors: Sequence[torch.Tensor] = (),
    ) -> None:
        self._number, self._tensors = number, tensors
        self._made: dict[int, Any] = {}

    def of(self, value: Any) -> Any:
        """Of an argument, or what lies in lists, tuples and dicts."""
        import torch

        if isinstance(value, torch.Tensor) and self._number is not None:
            return self._number(value)
        if isinstance(value, _At):
            return self._tensors[value.number]
        return self._plain(value, self.of)

    def _plain(self, value: Any, inner: Callable[[Any], Any]) -> Any:
        kind = type(value)
        if kind in (list, tuple):
            return kind(map(inner, value))
        if kind is dict:
            return {key: inner(part) for key, part in value.items()}
        return self._object(value) if _is_written_to(value) else value

    def _object(self, value: Any) -> Any:
        if id(value) not in self._made:
            try:
                self._made[id(value)] = twin = copy.copy(value)
                for name, part in vars(value).items():
                    twin.__dict__[name] = self._inside(part)
            except Exception:  # it can't be copied: it stays the one that it is
                self._made[id(value)] = value
        return self._made[id(value)]

    def _inside(self, value: Any) -> Any:
        """Of what an object is made of: its tensors are its own."""
        return self._plain(value, self._inside)


def _is_written_to(value: Any) -> bool:
    import torch

    if not hasattr(value, "__dict__") or callable(value):
        return False
    if isinstance(value, torch.nn.Module | torch.Tensor | Enum | ModuleType):
        return False
    return type(value).__module__.partition(".")[0] not in ("torch", "builtins")

"""Blocks of torch.autocast that are entered again: to make one takes longer than to enter it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Autocasts:
    """As `partial(torch.autocast, ...)` of a dtype, but that a block which was left is used again.

    Blocks that are open at a time, one in another or in several threads, are different ones.
    """

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        import torch

        self._plain = partial(torch.autocast, device_type, dtype=dtype)
        self._make = partial(_class(), device_type, dtype=dtype)
        # What a block does about the cache it has from when it was made.
        self._left: dict[bool, list[Any]] = {True: [], False: []}
        self._has_cache = torch.is_autocast_cache_enabled
        self._is_compiling = torch.compiler.is_compiling

    def __call__(self) -> AbstractContextManager[Any]:
        """One that is not open."""
        if self._is_compiling():  # the compiler knows torch's own
            return self._plain()
        left = self._left[self._has_cache()]
        try:
            return left.pop()  # type: ignore[no-any-return]
        except IndexError:
            block: AbstractContextManager[Any] = self._make()
            block.left = left  # type: ignore[attr-defined]
            return block


@cache
def _class() -> Callable[..., Any]:
    import torch

    leave = torch.autocast.__exit__

    class Autocast(torch.autocast):
        """Goes back to those that are not open."""

        left: list[Any]

        def __exit__(self, kind: Any, value: Any, traceback: Any) -> Any:
            leave(self, kind, value, traceback)
            self.left.append(self)

    return Autocast

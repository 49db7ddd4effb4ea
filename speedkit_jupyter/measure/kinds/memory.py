"""A tensor's memory in the user's own hand: torch's storages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure.kinds.base import Copies, Kind

if TYPE_CHECKING:
    import torch


class Storages(Kind):
    """Bytes and how many. A typed storage has such a one as its attribute."""

    bulky = True

    def recognizes(self, cls: type) -> bool:
        """Without a type: that of every tensor."""
        import torch

        return issubclass(cls, torch.UntypedStorage)

    def copy(self, found: Any, copies: Copies) -> tuple[Any, int]:
        """The bytes; only their number where they are too many."""
        fits = copies.fits(found, found.nbytes()) and found.device.type != "meta"
        return _bytes(found).clone() if fits else None, found.nbytes()

    def glance(self, found: Any) -> tuple[Any, int]:
        """Without the bytes."""
        return None, found.nbytes()

    def same(self, found: Any, memory: tuple[Any, int]) -> bool:
        """Byte by byte."""
        import torch

        saved, size = memory
        return found.nbytes() == size and (saved is None or torch.equal(_bytes(found), saved))

    def put_back(self, found: Any, memory: tuple[Any, int]) -> None:
        """Into its own memory."""
        saved, size = memory
        if found.nbytes() != size:
            found.resize_(size)
        if saved is not None:
            _bytes(found).copy_(saved)


def _bytes(storage: Any) -> torch.Tensor:
    import torch

    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

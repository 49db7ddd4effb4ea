"""The settings of a DataLoader, in torch's own words."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.support.words import count

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

# torch's default (torch.utils.data.DataLoader): each worker loads this many batches ahead.
PREFETCH = 2


@dataclass(frozen=True)
class Settings:
    """What changes how batches are loaded, and not which.

    `whole_batches` draws each batch by one index. `kept` keeps samples in main memory as they were
    first drawn. Without `in_order` batches come as they are ready. `copied_to` is the device that
    batches are being copied to when the loop gets them, without waiting for the copy.
    """

    num_workers: int = 0
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    pin_memory: bool = False
    multiprocessing_context: str | None = None
    in_order: bool = True
    whole_batches: bool = False
    kept: bool = False
    copied_to: str = ""

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> Settings:
        """Return the settings of a loader."""
        context = loader.multiprocessing_context
        return cls(
            num_workers=loader.num_workers,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
            pin_memory=loader.pin_memory,
            multiprocessing_context=None if context is None else context.get_start_method(),
            in_order=getattr(loader, "in_order", True),
        )

    def with_workers(self, number: int) -> Settings:
        """Return these settings with `number` workers, which stay between epochs."""
        if not number:
            return self.without_workers()
        factor = self.prefetch_factor or PREFETCH
        return replace(self, num_workers=number, prefetch_factor=factor, persistent_workers=True)

    def without_workers(self, **others: Any) -> Settings:
        """Return these settings without workers, and with `others`."""
        alone = replace(self, num_workers=0, prefetch_factor=None, persistent_workers=False)
        return replace(alone, multiprocessing_context=None, **others)

    @property
    def moves(self) -> tuple[bool, str]:
        """How batches come to the device that computes."""
        return self.pin_memory, self.copied_to

    @property
    def ahead(self) -> int:
        """How many batches may be loaded before they are asked for."""
        return self.num_workers * (self.prefetch_factor or PREFETCH)

    @property
    def words(self) -> str:
        """Return for example `2 workers, prefetch_factor=4`."""
        said = [count(self.num_workers, "worker")]
        if self.num_workers and self.prefetch_factor not in (None, PREFETCH):
            said.append(f"prefetch_factor={self.prefetch_factor}")
        if self.num_workers and not self.persistent_workers:
            said.append("started for each epoch")
        if self.multiprocessing_context is not None:
            said.append(self.multiprocessing_context)
        said += ["pin_memory"] * self.pin_memory + ["any order"] * (not self.in_order)
        said += ["whole batches"] * self.whole_batches
        said += ["kept in memory"] * self.kept
        said += [f"copied to {self.copied_to}"] * bool(self.copied_to)
        return ", ".join(said[1:] if len(said) > 1 and not self.num_workers else said)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of DataLoader that differ from its defaults."""
        found: dict[str, Any] = {}
        if self.num_workers:
            found["num_workers"] = self.num_workers
            found |= {"persistent_workers": True} if self.persistent_workers else {}
            if self.prefetch_factor not in (None, PREFETCH):
                found["prefetch_factor"] = self.prefetch_factor
            if self.multiprocessing_context is not None:
                found["multiprocessing_context"] = self.multiprocessing_context
            found |= {} if self.in_order else {"in_order": False}
        return found | ({"pin_memory": True} if self.pin_memory else {})

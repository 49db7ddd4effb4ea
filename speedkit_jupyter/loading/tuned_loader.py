"""A loader with other settings, that gives the same samples in the same order for the same seed."""

from __future__ import annotations

from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.loading.attributes import MOST, plain
from speedkit_jupyter.loading.copies import Copies
from speedkit_jupyter.loading.kept import Kept
from speedkit_jupyter.loading.settings import PREFETCH, Settings

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from speedkit_jupyter.loading.loader_tuning import LoaderTuning

    _Loader = DataLoader[Any]
else:  # it is mixed into torch's, or a user's, once there is a loader
    _Loader = object


class TunedLoader(_Loader):
    """A loader as its user made it, with other settings; `tuning` says what was measured.

    Workers that stay take one random number less at the start of each epoch: it is drawn, so that
    the order is that of workers that don't. They have the data set as it was when they began: where
    one of its plain attributes was set since, they begin anew, and so do samples that are kept.
    """

    tuning: LoaderTuning | None = None

    def __iter__(self) -> Any:
        """As DataLoader's."""
        import torch

        if self.persistent_workers and self.num_workers:
            told = [*islice(plain(self.dataset), MOST), *islice(plain(self.collate_fn), MOST)]
            if self._iterator is not None and told == self.__dict__["_told"]:
                torch.empty((), dtype=torch.int64).random_(generator=self.generator)
            else:
                end_workers(self)
            self.__dict__["_told"] = told
        if isinstance(self.dataset, Kept):
            self.dataset.begin()
        device = self.__dict__.get("_copied_to")
        return Copies(super().__iter__(), device) if device else super().__iter__()


def rebuilt(loader: DataLoader[Any], settings: Settings) -> DataLoader[Any]:
    """A loader like this one with other settings: all else, also of a class of the user's, stays.

    What torch's constructor would refuse to be set afterwards is set beside it: so a subclass's own
    constructor, whose arguments nobody knows, is not run.
    """
    from torch.utils.data import default_convert

    kind: Any = type(loader)
    other: DataLoader[Any] = object.__new__(_class_of(kind))
    other.__dict__.update(loader.__dict__)
    inside = other.__dict__
    inside |= {
        "num_workers": settings.num_workers,
        "prefetch_factor": (settings.prefetch_factor or PREFETCH) if settings.num_workers else None,
        "persistent_workers": settings.persistent_workers and settings.num_workers > 0,
        "pin_memory": settings.pin_memory,
        "_iterator": None,
        "_told": None,
        "_copied_to": settings.copied_to,
        "_DataLoader__multiprocessing_context": None,
    }
    if "in_order" in inside:
        inside["in_order"] = settings.in_order
    if settings.multiprocessing_context is not None and settings.num_workers:
        other.multiprocessing_context = settings.multiprocessing_context
    if settings.whole_batches:
        inside |= {
            "sampler": loader.batch_sampler,
            "batch_sampler": None,
            "collate_fn": default_convert,
        }
    if settings.kept and not isinstance(loader.dataset, Kept):
        inside["dataset"] = Kept(loader.dataset, settings.kept)
    return other


@cache
def _class_of(kind: type[DataLoader[Any]]) -> type[DataLoader[Any]]:
    if issubclass(kind, TunedLoader):
        return kind
    return type(kind.__name__, (TunedLoader, kind), {"__module__": kind.__module__})


def end_workers(loader: DataLoader[Any]) -> None:
    """None of them is left; the next epoch begins new ones."""
    iterator = loader._iterator
    loader._iterator = None
    end_those_of(iterator)


def end_those_of(iterator: Any) -> None:
    """The workers of a loader's iterator, where it has some."""
    shut = getattr(iterator, "_shutdown_workers", None)
    if shut is not None:
        shut()

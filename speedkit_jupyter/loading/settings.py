"""The settings of a DataLoader, in torch's own words, and the code that makes it so."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.support.words import count

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

# torch's default (torch.utils.data.DataLoader): each worker loads this many batches ahead.
PREFETCH = 2
ONCE_MORE = (
    "# where the data set is set to something else (an epoch, a switch), once more from here:"
)
STAY = (
    "\n# persistent_workers=True saves starting them for each epoch, where the data set never "
    "changes;\n# it shuffles otherwise from the second epoch on"
)


@dataclass(frozen=True)
class Settings:
    """What changes how batches are loaded, and not which.

    `whole_batches` draws each batch by one index. `kept` keeps samples in main memory as they were
    first drawn.
    """

    num_workers: int = 0
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    pin_memory: bool = False
    multiprocessing_context: str | None = None
    whole_batches: bool = False
    kept: bool = False

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> Settings:
        """Return the settings of a loader."""
        context = loader.multiprocessing_context
        return cls(
            loader.num_workers,
            loader.prefetch_factor,
            loader.persistent_workers,
            loader.pin_memory,
            None if context is None else context.get_start_method(),
        )

    def with_workers(self, number: int) -> Settings:
        """Return these settings with `number` workers, which stay between epochs."""
        factor = self.prefetch_factor or PREFETCH
        return replace(self, num_workers=number, prefetch_factor=factor, persistent_workers=True)

    def without_workers(self, **others: Any) -> Settings:
        """Return these settings without workers, and with `others`."""
        return Settings(pin_memory=self.pin_memory, **others)

    @property
    def words(self) -> str:
        """Return for example `2 workers, prefetch_factor=4`."""
        said = [count(self.num_workers, "worker")]
        if self.num_workers and self.prefetch_factor not in (None, PREFETCH):
            said.append(f"prefetch_factor={self.prefetch_factor}")
        if self.num_workers and not self.persistent_workers:
            said.append("started for each epoch")
        said += [self.multiprocessing_context] * (self.multiprocessing_context is not None)
        said += ["pin_memory"] * self.pin_memory + ["whole batches"] * self.whole_batches
        said += ["kept in memory"] * self.kept
        return ", ".join(said[1:] if len(said) > 1 and not self.num_workers else said)


def source(loader: DataLoader[Any], settings: Settings, name: str) -> str:
    """Return plain torch that gives the same batches as `settings`, from the loader that the user
    calls `name`.

    torch's workers that stay keep the data set as it is when they start, and shuffle otherwise from
    the second epoch on: those of the code are started for each epoch.
    """
    lines, data = [], f"{name}.dataset"
    if settings.kept:
        samples = "samples = [data[index] for index in range(len(data))]"
        lines, data = [f"data = {data}", ONCE_MORE, samples], "samples"
    words = {**_which(loader, settings, name), **_how(loader, settings, name)}
    arguments = ", ".join([data, *(f"{key}={value}" for key, value in words.items())])
    call = f"{name} = {type(loader).__name__}({arguments})"
    if settings.num_workers and settings.persistent_workers:
        call += STAY
    return "\n".join([*lines, call])


def _which(loader: DataLoader[Any], settings: Settings, name: str) -> dict[str, str]:
    """Return the arguments that say which samples make a batch."""
    from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

    if settings.whole_batches:
        return {"sampler": f"{name}.batch_sampler", "batch_size": "None"}
    plain = type(loader.batch_sampler) is BatchSampler and loader.batch_size is not None
    if not plain and loader.batch_sampler is not None:
        return {"batch_sampler": f"{name}.batch_sampler"}
    given, sampler = {"batch_size": repr(loader.batch_size)}, loader.sampler
    if type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None:
        given["shuffle"] = "True"
    elif type(sampler) is not SequentialSampler and hasattr(loader.dataset, "__getitem__"):
        given["sampler"] = f"{name}.sampler"
    return given | ({"drop_last": "True"} if loader.drop_last else {})


def _how(loader: DataLoader[Any], settings: Settings, name: str) -> dict[str, str]:
    """Return the other arguments that differ from torch's defaults."""
    from torch.utils.data import default_collate

    given = {}
    if loader.collate_fn is not default_collate and not settings.whole_batches:
        given["collate_fn"] = f"{name}.collate_fn"
    if loader.generator is not None:
        given["generator"] = f"{name}.generator"
    if settings.num_workers:
        if loader.worker_init_fn is not None:
            given["worker_init_fn"] = f"{name}.worker_init_fn"
        given["num_workers"] = str(settings.num_workers)
        if settings.prefetch_factor not in (None, PREFETCH):
            given["prefetch_factor"] = str(settings.prefetch_factor)
        if settings.multiprocessing_context is not None:
            given["multiprocessing_context"] = repr(settings.multiprocessing_context)
        if not getattr(loader, "in_order", True):
            given["in_order"] = "False"
    return given | ({"pin_memory": "True"} if settings.pin_memory else {})

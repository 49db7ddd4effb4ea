"""The choice as plain torch, to take home."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.loading.obstacles import is_iterable
from speedkit_jupyter.loading.settings import Settings

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


ONCE_MORE = (
    "# where the data set is set to something else (an epoch, a switch), once more from here:"
)
STAY = (
    "\n# persistent_workers=True saves starting them for each epoch, where the data set never "
    "changes;\n# it shuffles otherwise from the second epoch on"
)


def source(loader: DataLoader[Any], settings: Settings, name: str) -> str:
    """Return code that gives the same batches as `settings`, from the loader that the user calls
    `name`.

    torch's workers that stay keep the data set as it is when they start, and shuffle otherwise from
    the second epoch on: those of the code are started for each epoch.
    """
    given = _given(loader, settings, name)
    lines, data = [], f"{name}.dataset"
    if settings.kept:
        lines.append(f"data = {data}")
        lines.append(ONCE_MORE)
        lines.append("samples = [data[index] for index in range(len(data))]")
        data = "samples"
    words = [f"{key}={value}" for key, value in given.items()]
    settings_said = replace(settings, persistent_workers=False).arguments()
    words += [f"{key}={value!r}" for key, value in settings_said.items()]
    kind = type(loader).__name__
    call = f"{name} = {kind}({', '.join([data, *words])})"
    if settings.num_workers and settings.persistent_workers:
        call += STAY
    if settings.copied_to:
        call += f'\n# and in the loop: batch.to("{settings.copied_to}", non_blocking=True)'
    return "\n".join([*lines, call])


def _given(loader: DataLoader[Any], settings: Settings, name: str) -> dict[str, str]:
    """What the user's own was made with, and stays."""
    from torch.utils.data import BatchSampler, default_collate

    given: dict[str, str] = {}
    plain = type(loader.batch_sampler) is BatchSampler and loader.batch_size is not None
    if settings.whole_batches:
        given |= {"sampler": f"{name}.batch_sampler", "batch_size": "None"}
    elif plain or loader.batch_sampler is None:
        given["batch_size"] = repr(loader.batch_size)
        given |= _sampled(loader, name)
        given |= {"drop_last": "True"} if loader.drop_last else {}
    else:
        given["batch_sampler"] = f"{name}.batch_sampler"
    if loader.collate_fn is not default_collate and not settings.whole_batches:
        given["collate_fn"] = f"{name}.collate_fn"
    if loader.generator is not None:
        given["generator"] = f"{name}.generator"
    if loader.worker_init_fn is not None and settings.num_workers:
        given["worker_init_fn"] = f"{name}.worker_init_fn"
    return given


def _sampled(loader: DataLoader[Any], name: str) -> dict[str, str]:
    from torch.utils.data import RandomSampler, SequentialSampler

    sampler: Any = loader.sampler
    if is_iterable(loader) or type(sampler) is SequentialSampler:
        return {}
    usual = type(sampler) is RandomSampler and not sampler.replacement
    if usual and sampler._num_samples is None:
        return {"shuffle": "True"}
    return {"sampler": f"{name}.sampler"}

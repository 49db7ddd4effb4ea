"""Autocast's own state, as process-wide switches."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial

from speedkit_jupyter.machines import devices, flags


def autocast_switches() -> Mapping[str, flags.Switch]:
    """Autocast's own state, for each kind of device."""
    import torch

    cached = torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, (False,)
    switches = {"autocast.cache_enabled": flags.Switch(*cached)}
    for kind in _kinds_with_autocast():
        switches[f"autocast.{kind}.enabled"] = flags.Switch(
            partial(torch.is_autocast_enabled, kind),
            partial(torch.set_autocast_enabled, kind),
            (True,),
        )
        usual = torch.get_autocast_dtype(kind)
        dtype = torch.float16 if usual is torch.bfloat16 else torch.bfloat16
        switches[f"autocast.{kind}.dtype"] = flags.Switch(
            partial(torch.get_autocast_dtype, kind),
            partial(torch.set_autocast_dtype, kind),
            (dtype,),
        )
    return switches


def _kinds_with_autocast() -> list[str]:
    """The kinds of device that this torch has autocast for, those unknown here with them."""
    import torch

    kinds = ["cpu", "cuda"]
    for kind in dict.fromkeys((*devices.KINDS, "hpu", "mtia", "xla", "privateuseone")):
        if kind in kinds:
            continue
        with suppress(RuntimeError):
            torch.is_autocast_enabled(kind)
            torch.get_autocast_dtype(kind)
            kinds.append(kind)
    return kinds

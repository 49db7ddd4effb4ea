"""Autocast: which precision an accelerator is built for, torch's switches, and plain code."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial

from speedkit_jupyter.machines import devices, flags
from speedkit_jupyter.machines.hardware import Accelerator
from speedkit_jupyter.optimizations.base.snippet import Form, Snippet
from speedkit_jupyter.support.exceptions import SpeedKitError

# The config's words, as torch calls them.
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def autocast_source(dtype: str, device_type: str, form: Form) -> Snippet:
    """Return torch.autocast around the forward pass, or the framework's mixed precision."""
    arguments = framework_precision(dtype, device_type, form)
    if arguments:
        own = {"accelerate": ("accelerator.autocast()",), "fabric": ("fabric.autocast()",)}
        return Snippet(arguments=arguments, forward=own.get(form, ()))
    if form == "transformers":
        raise SpeedKitError(f"Trainer has no {dtype} on {device_type}: take --as torch")
    return Snippet(forward=(f'torch.autocast("{device_type}", dtype=torch.{DTYPES[dtype]})',))


def framework_precision(dtype: str, device_type: str, form: Form) -> dict[str, str]:
    """Return a framework's arguments for mixed precision; none for fp16 on a CPU."""
    if dtype == "fp16" and device_type == "cpu":
        return {}
    fabric = {"bf16": '"bf16-mixed"', "fp16": '"16-mixed"'}
    arguments: dict[str, dict[str, str]] = {
        "accelerate": {"mixed_precision": f'"{dtype}"'},
        "fabric": {"precision": fabric[dtype]},
        "transformers": {dtype: "True"},
    }
    return arguments.get(form, {})


def has_fp16(gpu: Accelerator) -> bool:
    """Whether it multiplies fp16 natively."""
    return gpu.tensor_cores or not gpu.is_nvidia


def native_precision(gpu: Accelerator) -> tuple[str, str, bool]:
    """Return the precision that this accelerator is built for, why, and whether it always pays."""
    capability = ".".join(map(str, gpu.capability or ()))
    if not gpu.is_nvidia:
        return _by_kind(gpu)
    if gpu.bf16:
        return "bf16", f"compute capability {capability} >= 8.0: bf16 Tensor Cores", True
    if gpu.tensor_cores:
        return (
            "fp16",
            f"compute capability {capability}: fp16 Tensor Cores, no bf16 (it would be emulated)",
            True,
        )
    return "fp32", f"{gpu.name} (compute capability {capability}) has no Tensor Cores", True


def _by_kind(gpu: Accelerator) -> tuple[str, str, bool]:
    kind = devices.KINDS[gpu.kind]
    if not gpu.bf16:
        return "fp32", f"{gpu.name} {kind.no_bf16}", True
    if set(kind.emulating) & set(gpu.name.split()):
        return "fp32", f"{gpu.name} emulates bf16; fp16 is there on request", True
    return "bf16", f"{gpu.name} {kind.bf16}", False


def autocast_switches() -> Mapping[str, flags.Switch]:
    """Return autocast's own state, for each kind of device."""
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
    """Return the kinds of device that this torch has autocast for, those unknown here with them."""
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

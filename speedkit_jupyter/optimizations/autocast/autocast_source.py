"""Autocast as plain code, for each form: torch's block, or a framework's mixed precision."""

from __future__ import annotations

from speedkit_jupyter.optimizations.base.snippet import Form, Snippet
from speedkit_jupyter.support.exceptions import SpeedKitError

# The config's words, as torch calls them.
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def autocast_source(dtype: str, device_type: str, form: Form) -> Snippet:
    """torch.autocast around the forward pass, or the framework's mixed precision."""
    arguments = framework_precision(dtype, device_type, form)
    if arguments:
        own = {"accelerate": ("accelerator.autocast()",), "fabric": ("fabric.autocast()",)}
        return Snippet(arguments=arguments, forward=own.get(form, ()))
    if form == "transformers":
        raise SpeedKitError(f"Trainer has no {dtype} on {device_type}: take --as torch")
    return Snippet(forward=(f'torch.autocast("{device_type}", dtype=torch.{DTYPES[dtype]})',))


def framework_precision(dtype: str, device_type: str, form: Form) -> dict[str, str]:
    """A framework's arguments for mixed precision; empty where it has none (fp16 on a CPU)."""
    if dtype == "fp16" and device_type == "cpu":
        return {}
    fabric = {"bf16": '"bf16-mixed"', "fp16": '"16-mixed"'}
    arguments: dict[str, dict[str, str]] = {
        "accelerate": {"mixed_precision": f'"{dtype}"'},
        "fabric": {"precision": fabric[dtype]},
        "transformers": {dtype: "True"},
    }
    return arguments.get(form, {})

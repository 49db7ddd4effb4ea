"""The compilers behind torch.compile: which there are, and which of them are guests."""

from __future__ import annotations

import sys
from typing import NamedTuple

from speedkit_jupyter.support.exceptions import did_you_mean

INDUCTOR = "inductor"
# Torch's own that are there wherever torch is, and need nothing.
OWN = (INDUCTOR, "eager", "aot_eager", "cudagraphs")


class Guest(NamedTuple):
    """A package that brings a backend: what installs it, and the module that registers it."""

    package: str
    module: str


# By the names of their backends; source: each project's own page.
GUESTS = {
    "zentorch": Guest("zentorch", "zentorch"),
    "openvino": Guest("openvino", "openvino.torch"),
    "tensorrt": Guest("torch-tensorrt", "torch_tensorrt"),
    "torch_tensorrt": Guest("torch-tensorrt", "torch_tensorrt"),
    "ipex": Guest("intel-extension-for-pytorch", "intel_extension_for_pytorch"),
    "openxla": Guest("torch_xla", "torch_xla"),
    "tvm": Guest("apache-tvm", "tvm"),
    "hidet": Guest("hidet", "hidet"),
}


def known(name: str) -> str:
    """The name as it was registered, however it is written.

    Raises ValueError, with the nearest, for one that nobody has registered. Loads Dynamo (seconds)
    for all but torch's most usual ones.
    """
    if name in OWN:
        return name
    from torch._dynamo import list_backends

    everything = [*list_backends(None), *GUESTS]
    spelled = {name.lower(): name for name in everything} | {name: name for name in everything}
    if registered := spelled.get(name, spelled.get(name.lower())):
        return registered
    shown = dict.fromkeys([*OWN, *list_backends(), *GUESTS])
    raise ValueError(
        f"{name!r} is no registered backend; there are {', '.join(shown)}."
        f"{did_you_mean(name, everything)}"
    )


def loaded() -> tuple[str, ...]:
    """Those whose code is in this process: torch's own, the user's, and guests once imported."""
    registry = sys.modules.get("torch._dynamo.backends.registry")
    functions = getattr(registry, "_COMPILER_FNS", {})
    entry_points = getattr(registry, "_BACKENDS", {})
    imported = (n for n, entry in entry_points.items() if entry and entry.module in sys.modules)
    names = dict.fromkeys([*OWN, *functions, *imported])
    return tuple(n for n in names if n not in GUESTS or GUESTS[n].module in sys.modules)


def obstacle(name: str, names: tuple[str, ...], device_type: str) -> str | None:
    """Why it can't be used where `names` are loaded, or None.

    A guest is not imported by us: that changes torch for the whole process (other compilers'
    passes, kernels), for other plans too, and there is no way back.
    """
    if name == "cudagraphs" and device_type != "cuda":
        return f"CUDA graphs need CUDA, and the model is on {device_type}"
    if name in names:
        return None
    guest = GUESTS.get(name)
    install = f"`pip install {guest.package}`, then " if guest else ""
    module = guest.module if guest else "its package"
    return (
        f"{name} is not loaded: {install}`import {module}` in a cell of its own; that changes "
        "torch for the whole process and can't be undone, so SpeedKit does not do it"
    )


def remark(name: str) -> str:
    """What to know of what is measured beside it; empty for most."""
    if name not in GUESTS:
        return ""
    return f"{name} has changed torch for this whole process, other plans included"

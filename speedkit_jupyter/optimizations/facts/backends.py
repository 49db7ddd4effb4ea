"""The compilers behind torch.compile that are registered in this process."""

from __future__ import annotations

import sys

from speedkit_jupyter.support.exceptions import did_you_mean
from speedkit_jupyter.support.torch_private import registered_backends

INDUCTOR = "inductor"
# Torch's own that are there wherever torch is, and need nothing.
OWN = (INDUCTOR, "eager", "aot_eager", "cudagraphs")
IMPORT = (
    "one of another package is there once you have imported that in a cell of its own, which "
    "changes torch for the whole process and can't be undone"
)


def known(name: str) -> str:
    """Return the name as it was registered, however it is written.

    Raises ValueError, with the nearest, for one that nobody has registered. Loads Dynamo (seconds)
    for all but torch's most usual ones.
    """
    if name in OWN:
        return name
    from torch.compiler import list_backends

    everything = list_backends(())
    spelled = {name.lower(): name for name in everything} | {name: name for name in everything}
    if registered := spelled.get(name, spelled.get(name.lower())):
        return registered
    shown = ", ".join(dict.fromkeys([*OWN, *list_backends()]))
    near = did_you_mean(name, everything)
    raise ValueError(f"{name!r} is no registered backend; there are {shown}; {IMPORT}.{near}")


def loaded() -> tuple[str, ...]:
    """Those whose code is in this process: torch's own, the user's, and others' once imported."""
    functions, entry_points = registered_backends()
    imported = (n for n, entry in entry_points.items() if entry and entry.module in sys.modules)
    return tuple(dict.fromkeys([*OWN, *functions, *imported]))


def obstacle(name: str, names: tuple[str, ...], device_type: str) -> str | None:
    """Why it can't be used where `names` are loaded, or None. No plan imports a package."""
    if name == "cudagraphs" and device_type != "cuda":
        return f"CUDA graphs need CUDA, and the model is on {device_type}"
    return None if name in names else f"{name} is not loaded: {IMPORT}"

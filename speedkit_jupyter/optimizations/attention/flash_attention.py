"""FlashAttention 3 and 4: packages of their own, which torch takes in place of its flash kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from speedkit_jupyter.machines import flags
from speedkit_jupyter.machines.hardware import Accelerator, Hardware

SWITCH = "sdp.flash_attention"
HINT = "calls with dropout raise an error then, as those do that it can't take"


@dataclass(frozen=True)
class Implementation:
    """`name` is torch's for it, `library` the one on PyPI, `majors` the first numbers of the
    compute capabilities that it is written for.
    """

    name: str
    library: str
    majors: tuple[int, ...]


IMPLEMENTATIONS = {
    "fa3": Implementation("FA3", "flash-attn-3", (9,)),
    "fa4": Implementation("FA4", "flash-attn-4", (9, 10)),
}


def obstacle(word: str, hardware: Hardware, gpu: Accelerator) -> str:
    """Why it can't be had on this GPU, with this torch; empty where it can."""
    wanted = IMPLEMENTATIONS[word]
    if not gpu.is_nvidia or gpu.capability is None or gpu.capability[0] not in wanted.majors:
        majors = " or ".join(f"{major}.0" for major in wanted.majors)
        return f"{word!r} needs an NVIDIA GPU of compute capability {majors}; this is {gpu.name}"
    if not switches():
        return f"{word!r} needs a newer torch, which takes other kernels in place of its own"
    if wanted.library not in hardware.libraries:
        return f"{word!r} needs {wanted.library}: pip install {wanted.library}"
    return ""


def active() -> str:
    """The name of the one that is registered; empty for torch's own kernel."""
    from torch.nn.attention import current_flash_attention_impl

    return current_flash_attention_impl() or ""


def use(name: str) -> None:
    """From now on; empty for torch's own. Raises what importing it raises."""
    from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

    if name:
        activate_flash_attention_impl(name)
    else:
        restore_flash_attention_impl(_raise_warn=False)


def switches() -> Mapping[str, flags.Switch]:
    """None where this torch registers none."""
    import torch.nn.attention

    known = hasattr(torch.nn.attention, "current_flash_attention_impl")
    return {SWITCH: flags.Switch(active, use)} if known else {}

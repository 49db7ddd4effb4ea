"""Which kernel `scaled_dot_product_attention` tries first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

from pydantic import Field

from speedkit_jupyter.machines import flags
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.optimizations.base import (
    Decision,
    Effect,
    Optimization,
    Request,
    Target,
    overridden,
)
from speedkit_jupyter.optimizations.facts import Facts
from speedkit_jupyter.optimizations.options import Fields
from speedkit_jupyter.optimizations.snippet import Form, Snippet

BACKENDS = {
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "math": "MATH",
}
SWITCHES = ("sdp.flash", "sdp.efficient", "sdp.math", "sdp.cudnn", "sdp.priority_order")


class Sdpa(Optimization):
    """The chosen kernel comes first; inputs that it can't take go to the others, never to an error.

    No fixed order is right on all GPUs, so `auto` leaves torch's own.
    """

    name = "sdpa"
    effect = Effect.ROUNDING
    summary = "the attention kernel that is tried first"
    helps = (
        "models with scaled_dot_product_attention, where torch's first choice is not the fastest"
    )
    risk = "kernels sum in another order"
    undone = "the switches of all kernels and their order are what they were"
    page = (
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_pr"
        "oduct_attention.html"
    )

    class Options(Fields):
        """`backend`: the kernel to try first; `math` allows no other."""

        backend: Literal["auto", "flash", "efficient", "cudnn", "math"] = Field(
            "auto", description="auto, flash, efficient, cudnn, math"
        )

    default = Options()

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        """By request only, and only a kernel that the device has."""
        asked = request.value.backend
        if asked == "auto":
            return request.leave(
                "auto", "torch's own order stays: no fixed one is right everywhere; measure yours"
            )
        if asked == "math":
            return request.obey("math", "the plain kernel and no other")
        if facts.device_type == "cpu":
            return request.decline(
                "auto", f"{asked!r} is a CUDA kernel; on a CPU torch uses its own fused one already"
            )
        gpu = hardware.accelerator(facts.device)
        if gpu is None or gpu.kind != "cuda":
            return request.decline("auto", f"{asked!r} is a CUDA kernel; this is {facts.device}")
        if gpu.is_nvidia and asked in ("flash", "cudnn") and not gpu.bf16:
            return request.apply(
                "efficient",
                f"{asked!r} needs compute capability 8.0; the nearest that {gpu.name} has is "
                "'efficient'",
                declined=True,
            )
        return request.obey(asked, hint="inputs that it can't take go to the other kernels")

    def switches(self) -> Mapping[str, flags.Switch]:
        """Which kernels may be taken, and in which order."""
        import torch
        from torch.backends import cuda

        off = (False,)
        reorder = torch._C._set_sdp_priority_order
        return {
            "sdp.flash": flags.Switch(cuda.flash_sdp_enabled, cuda.enable_flash_sdp, off),
            "sdp.efficient": flags.Switch(
                cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp, off
            ),
            "sdp.math": flags.Switch(cuda.math_sdp_enabled, cuda.enable_math_sdp, off),
            "sdp.cudnn": flags.Switch(cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp, off),
            "sdp.priority_order": flags.Switch(
                torch._C._get_sdp_priority_order, reorder, ([0, 1, 2, 3, 4],)
            ),
        }

    def expected(self, decision: Decision, target: Target, facts: Facts) -> Mapping[str, Any]:
        """The switches, and the tag for torch.compile's caches."""
        first, kernels = _order(decision.value, facts.flags.get("sdp.priority_order", ()))
        fused = decision.value != "math"
        return {
            **{f"sdp.{kernel}": fused for kernel in ("flash", "efficient", "cudnn")},
            "sdp.math": True,
            "sdp.priority_order": [first, *kernels],
            "compiler.cache_key_tag": _tag(
                facts.flags.get("compiler.cache_key_tag", ""), decision.value
            ),
        }

    def as_is(self, facts: Facts) -> Any:
        """Torch's own order."""
        return "auto"

    @contextmanager
    def applied(self, decision: Decision, target: Target) -> Iterator[None]:
        """Set the process-wide switches, and tell torch.compile's caches (they don't look)."""
        import torch.compiler.config as config

        names = (*SWITCHES, "compiler.cache_key_tag")
        tag = _tag(config.cache_key_tag, decision.value)

        def change() -> None:
            _choose(decision.value)
            config.cache_key_tag = tag

        with overridden(target, names, change):
            yield

    def around_forward(
        self, decision: Decision, target: Target
    ) -> Callable[[], AbstractContextManager[Any]]:
        """The same choice for one block, where another plan is in force process-wide."""
        if decision.value == "auto":
            return nullcontext
        return lambda: overridden(target, SWITCHES, lambda: _choose(decision.value))

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        """torch's public context manager, with the same switches and order inside.

        Compiled code needs a tag: the choice is not part of its cache's key.
        """
        first = BACKENDS[decision.value]
        names = (first,) if decision.value == "math" else _in_order(first)
        kernels = ", ".join(f"SDPBackend.{name}" for name in names)
        tag = f'torch.compiler.config.cache_key_tag = "|sdpa:{decision.value}"'
        return Snippet(
            imports=("from torch.nn.attention import SDPBackend, sdpa_kernel",),
            setup=(f"attention = [{kernels}]",),
            compiling=(
                "# torch.compile's cache does not tell one choice of kernels from another.",
                tag,
            ),
            forward=("sdpa_kernel(attention, set_priority=True)",),
        )

    def candidates(self, hardware: Hardware, facts: Facts) -> tuple[Any, ...]:
        """Every kernel that the GPU has; on a CPU torch's own choice has no rival."""
        gpu = hardware.accelerator(facts.device)
        if gpu is None or gpu.kind != "cuda":
            return ()
        return ("flash", "cudnn", "efficient") if gpu.bf16 else ("efficient",)


def _in_order(first: str) -> tuple[str, ...]:
    """The chosen kernel, and after it the others in torch's own order."""
    import torch
    from torch.nn.attention import SDPBackend

    names = {int(getattr(SDPBackend, name)): name for name in BACKENDS.values()}
    order = [names[number] for number in torch._C._get_sdp_priority_order() if number in names]
    return (first, *(name for name in order if name != first))


def _choose(backend: str) -> None:
    import torch
    from torch.backends import cuda

    only_math = backend == "math"
    cuda.enable_flash_sdp(not only_math)
    cuda.enable_mem_efficient_sdp(not only_math)
    cuda.enable_cudnn_sdp(not only_math)
    cuda.enable_math_sdp(True)
    first, kernels = _order(backend, torch._C._get_sdp_priority_order())
    torch._C._set_sdp_priority_order([first, *kernels])


def _order(backend: str, now: Sequence[int]) -> tuple[int, list[int]]:
    """The number of the kernel that comes first, and those after it."""
    from torch.nn.attention import SDPBackend

    first = int(getattr(SDPBackend, BACKENDS[backend]))
    return first, [number for number in now if number != first]


def _tag(now: str, backend: str) -> str:
    return f"{now}|sdpa:{backend}"

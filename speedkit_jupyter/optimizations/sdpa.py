"""Which kernel `scaled_dot_product_attention` tries first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

from speedkit_jupyter.machines import devices, flags
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.optimizations.base.decision import Decision, Effect, Request
from speedkit_jupyter.optimizations.base.optimization import Optimization
from speedkit_jupyter.optimizations.base.options import Fields
from speedkit_jupyter.optimizations.base.snippet import Form, Snippet
from speedkit_jupyter.optimizations.base.target import Target, overridden
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.support import torch_private

BACKENDS = {
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "math": "MATH",
}
SWITCHES = ("sdp.flash", "sdp.efficient", "sdp.math", "sdp.cudnn", "sdp.priority_order")


class Sdpa(Optimization):
    """The chosen kernel comes first; inputs that it can't take go to the others, never to an error.

    No fixed order is right everywhere, so `auto` leaves torch's own, and a search tries each kernel
    of a GPU. On a CPU there are torch's fused kernel, which comes first by itself, and `math`.
    """

    name = "sdpa"
    none = "auto"
    effect = Effect.ROUNDING
    rivals = True
    summary = "the attention kernel that is tried first"
    helps = "scaled_dot_product_attention, where torch's first choice is not the fastest"
    risk = "kernels sum in another order"
    undone = "the switches of all kernels and their order are what they were"
    page = "https://docs.pytorch.org/docs/stable/nn.attention.html"

    class Options(Fields):
        """`backend`: the kernel to try first; `math` allows no other."""

        backend: Literal["auto", "flash", "efficient", "cudnn", "math"] = "auto"

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        """Decide for a kernel that the device has, by request only."""
        asked = request.value.backend
        if asked == "auto":
            return request.leave("auto", "torch's own order stays: no other is right everywhere")
        if asked == "math":
            return request.obey("math", "the plain kernel and no other")
        if facts.device_type == "cpu":
            own = "on a CPU torch uses its own fused one already"
            return request.decline("auto", f"{asked!r} is a CUDA kernel; {own}")
        gpu = hardware.accelerator(facts.device)
        if gpu is None or not devices.KINDS[gpu.kind].attention:
            return request.decline("auto", f"{asked!r} is a CUDA kernel; this is {facts.device}")
        if gpu.is_nvidia and asked in ("flash", "cudnn") and not gpu.bf16:
            nearest = f"the nearest that {gpu.name} has is 'efficient'"
            reason = f"{asked!r} needs compute capability 8.0; {nearest}"
            return request.apply("efficient", reason, declined=True)
        return request.obey(asked, hint="inputs that it can't take go to the other kernels")

    def switches(self) -> Mapping[str, flags.Switch]:
        from torch.backends import cuda

        off = (False,)
        return {
            "sdp.flash": flags.Switch(cuda.flash_sdp_enabled, cuda.enable_flash_sdp, off),
            "sdp.efficient": flags.Switch(
                cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp, off
            ),
            "sdp.math": flags.Switch(cuda.math_sdp_enabled, cuda.enable_math_sdp, off),
            "sdp.cudnn": flags.Switch(cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp, off),
            "sdp.priority_order": flags.Switch(
                torch_private.attention_order,
                torch_private.set_attention_order,
                ([0, 1, 2, 3, 4],),
            ),
        }

    def expected(self, decision: Decision, target: Target, facts: Facts) -> Mapping[str, Any]:
        now = facts.flags.get("sdp.priority_order", ())
        fused = decision.value != "math"
        return {
            **{f"sdp.{kernel}": fused for kernel in ("flash", "efficient", "cudnn")},
            "sdp.math": True,
            "sdp.priority_order": order(decision.value, now),
            "compiler.cache_key_tag": _tag(
                facts.flags.get("compiler.cache_key_tag", ""), decision.value
            ),
        }

    @contextmanager
    def applied(self, decision: Decision, target: Target) -> Iterator[None]:
        """Set the process-wide switches, and tell torch.compile's caches (they don't look)."""
        import torch.compiler.config as config

        names = (*SWITCHES, "compiler.cache_key_tag")
        tag = _tag(config.cache_key_tag, decision.value)

        def change() -> None:
            choose(decision.value)
            config.cache_key_tag = tag

        with overridden(target, names, change):
            yield

    def around_forward(
        self, decision: Decision, target: Target
    ) -> Callable[[], AbstractContextManager[Any]]:
        """Return the same choice for a block, where another plan is in force."""
        if decision.value == "auto":
            return nullcontext
        change = partial(choose, decision.value)
        return lambda: overridden(target, SWITCHES, change)

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        """Return torch's public context manager, with the same switches and order inside.

        Compiled code needs a tag: the choice is not part of its cache's key.
        """
        word = decision.value
        names = ("MATH",) if word == "math" else in_order(word)
        kernels = ", ".join(f"SDPBackend.{name}" for name in names)
        tag = f'torch.compiler.config.cache_key_tag = "|sdpa:{word}"'
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
        """Return the kernels of a GPU; on a CPU there is no faster one than torch's own."""
        gpu = hardware.accelerator(facts.device)
        if gpu is None or not devices.KINDS[gpu.kind].attention:
            return ()
        return ("flash", "cudnn", "efficient") if gpu.bf16 else ("efficient",)


def _tag(now: str, backend: str) -> str:
    return f"{now}|sdpa:{backend}"


def choose(word: str) -> None:
    """Put this one first and the others in torch's own order from now on; beside `math` none."""
    from torch.backends import cuda

    only_math = word == "math"
    cuda.enable_flash_sdp(not only_math)
    cuda.enable_mem_efficient_sdp(not only_math)
    cuda.enable_cudnn_sdp(not only_math)
    cuda.enable_math_sdp(True)
    torch_private.set_attention_order(order(word, torch_private.attention_order()))


def order(word: str, now: Sequence[int]) -> list[int]:
    """Return the numbers of the kernels: the chosen one, and those after it."""
    from torch.nn.attention import SDPBackend

    first = int(getattr(SDPBackend, BACKENDS[word]))
    return [first, *(number for number in now if number != first)]


def in_order(word: str) -> tuple[str, ...]:
    """Return the same order in torch's words."""
    from torch.nn.attention import SDPBackend

    known = {int(getattr(SDPBackend, name)): name for name in BACKENDS.values()}
    every = order(word, torch_private.attention_order())
    return tuple(known[number] for number in every if number in known)

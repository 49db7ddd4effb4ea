"""The calls of modules that Liger has a kernel for, around what they compute otherwise.

Where anything else wants to see the inside of such a module, or has put something there, it runs as
ever: hooks, another forward on the instance, a compiler. So do inputs that no kernel takes.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar

from speedkit_jupyter.optimizations.facts.fusible import ROTATE, TORCHS, eps_of
from speedkit_jupyter.optimizations.fusing import liger
from speedkit_jupyter.optimizations.properties.calls import Call
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.threads import is_here, is_pythons

if TYPE_CHECKING:
    import torch

NAME = "fused_kernels"
# Whose layers keep nothing of their results but what autograd knows of.
LAYERS = {"torch", "transformers"}


class Fused(Call):
    """One module's calls, by the kernels of `functional`, and `how` they are called for its class.

    `only_in` is the number of the one thread that it acts in; None for all.
    """

    kind: ClassVar[str] = ""
    only_in: int | None = None

    def __init__(
        self, module: torch.nn.Module, functional: Any, how: Any, notes: dict[str, str]
    ) -> None:
        super().__init__(module)
        self._functional, self._how, self._notes = functional, how, notes
        self._own: Any = type(module).forward
        self._failed = False

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """The module's own result, within rounding. A kernel that fails never stops it; the user's
        own errors do.
        """
        import torch

        if not self._is_free() or not self._suits(args, kwargs):
            return self.below(*args, **kwargs)
        try:
            return self._fused(args, kwargs)
        except (torch.OutOfMemoryError, SpeedKitError):
            raise
        except Exception as error:
            if type(error).__module__ == "torch.utils.checkpoint":
                raise  # so it says that it has computed again what it needs
            result = self.below(*args, **kwargs)  # where it fails too, the mistake is the user's
            self._give_up(error)
            return result

    @abstractmethod
    def _suits(self, args: Any, kwargs: Any) -> bool:
        """Whether the kernel may be given this; asked before anything has run."""

    @abstractmethod
    def _fused(self, args: Any, kwargs: Any) -> Any:
        """The module's result, with the kernel in it."""

    def _is_free(self) -> bool:
        """Whether nobody else has to do with the inside of this call."""
        import torch
        from torch.nn.modules import module

        here = self.only_in is None or is_here(self.only_in) or not is_pythons()
        alone = self.inner is None or isinstance(self.inner, Fused)
        is_as_known = type(self.module).forward is self._own
        if self._failed or not (here and alone and is_as_known) or torch.compiler.is_compiling():
            return False
        return (
            not any(map(_is_watched, self.module.modules())) and not module._has_any_global_hook()
        )

    def _give_up(self, error: Exception) -> None:
        self._failed = True
        first = (str(error).splitlines() or [""])[0]
        name = type(self.module).__name__
        note = f"Liger's {self.kind} failed, so {name} runs as before: {first}"
        if self._notes.get(NAME) != note:
            self._notes[NAME] = note
            warnings.warn(f"{note} (%speedkit report)", stacklevel=4)


class FusedNorm(Fused):
    """RMSNorm in one kernel, which reads each row once."""

    kind = "rms_norm"

    def _suits(self, args: Any, kwargs: Any) -> bool:
        weight: Any = self.module._parameters.get("weight")
        if not _is_one(args, kwargs) or weight is None or not liger.takes(args[0], weight):
            return False
        x = args[0]
        fits = weight.shape == x.shape[-1:]
        return fits and (self._how is not TORCHS or _is_as_torchs(self.module, x, weight))

    def _fused(self, args: Any, kwargs: Any) -> Any:
        x, weight, how = args[0], self.module._parameters["weight"], self._how
        eps = eps_of(self.module, how)
        # Not in place: what comes back may be the gradient of a residual sum, too.
        result = self._functional.liger_rms_norm(x, weight, eps, how.offset, how.casting, False)
        liger.once(self.kind, result, writes=False)
        return result.to(_promoted(x, weight)) if how.casting == "llama" else result


class FusedMlp(Fused):
    """Activation and product of an MLP with a gate in one kernel, which keeps neither."""

    kind = "swiglu"

    def __init__(
        self, module: torch.nn.Module, functional: Any, how: Any, notes: dict[str, str]
    ) -> None:
        super().__init__(module, functional, how, notes)
        self._known = self._activation(module)

    def _suits(self, args: Any, kwargs: Any) -> bool:
        is_known = self._activation(self.module) is self._known
        return is_known and _is_one(args, kwargs) and liger.takes(args[0])

    def _projections(self) -> Iterable[torch.nn.Module]:
        parts = self.module._modules
        return (part for name in self._how[:2] if (part := parts.get(name)) is not None)

    def _fused(self, args: Any, kwargs: Any) -> Any:
        parts: Any = self.module
        how = self._how
        gate, up = getattr(parts, how.gate)(*args), getattr(parts, how.up)(*args)
        return getattr(parts, how.down)(self._product(gate, up))

    def _product(self, gate: Any, up: Any) -> Any:
        if not (_keep_nothing(self._projections()) and _may_write_over(gate, up)):
            return self._known(gate) * up
        kernel = getattr(self._functional, f"liger_{self._how.kernel}")
        return liger.once(self.kind, kernel(gate, up), writes=True)

    def _activation(self, module: torch.nn.Module) -> Any:
        from torch.nn.functional import silu

        return getattr(module, self._how.activation) if self._how.activation else silu


class FusedRotation(Fused):
    """An attention whose queries and keys are rotated by one kernel.

    Its own forward runs, in which one global name means something else.
    """

    kind = "rope"

    def __init__(
        self, module: torch.nn.Module, functional: Any, how: Any, notes: dict[str, str]
    ) -> None:
        super().__init__(module, functional, how, notes)
        self._known = self._own.__globals__[ROTATE]
        self._forward = with_other(self._own, {ROTATE: self._rotated})
        self._halves_are_alike: bool | None = None

    def _suits(self, args: Any, kwargs: Any) -> bool:
        is_known = self._own.__globals__.get(ROTATE) is self._known
        return is_known and _keep_nothing([self.module])

    def _fused(self, args: Any, kwargs: Any) -> Any:
        return self._forward(self.module, *args, **kwargs)

    def _rotated(self, q: Any, k: Any, cos: Any, sin: Any, *more: Any, **named: Any) -> Any:
        if more or named or not self._fits(q, k, cos, sin):
            return self._known(q, k, cos, sin, *more, **named)
        dtype = _promoted(q, cos)
        q, k = self._functional.liger_rope(q, k, cos, sin)[:2]
        liger.once(self.kind, q, writes=False)
        return q.to(dtype), k.to(dtype)

    def _fits(self, q: Any, k: Any, cos: Any, sin: Any) -> bool:
        if not liger.takes(q, k, cos, sin) or [t.dim() for t in (q, k, cos, sin)] != [4, 4, 3, 3]:
            return False
        batch, _, rows, width = q.shape
        fits = (
            rows > 1  # the stride of a single one means nothing, and the kernel goes by it
            and (k.shape[0], *k.shape[2:]) == (batch, rows, width)
            and cos.shape == sin.shape == (cos.shape[0], rows, width)
            and cos.shape[0] in (1, batch)
            and width % 2 == 0
            and (q.dtype, cos.dtype) == (k.dtype, sin.dtype)
            and not (cos.requires_grad or sin.requires_grad)
        )
        return fits and _are_nobodys(q, k) and self._has_twice_the_same(cos, sin)

    def _has_twice_the_same(self, cos: Any, sin: Any) -> bool:
        """The kernel reads the first half of the angles only. Asked once: it waits for the GPU."""
        import torch

        if self._halves_are_alike is None:
            self._halves_are_alike = all(torch.equal(*t.chunk(2, -1)) for t in (cos, sin))
        return self._halves_are_alike


class _Names(dict[str, Any]):
    """The global names of a function, some of which mean something else."""

    def __init__(self, names: dict[str, Any], others: dict[str, Any]) -> None:
        # Python itself reads these without asking for what is missing.
        super().__init__({name: names[name] for name in names if name.startswith("__")} | others)
        self._names = names

    def __missing__(self, name: str) -> Any:
        return self._names[name]


def with_other(function: FunctionType, others: dict[str, Any]) -> Callable[..., Any]:
    """The same function, for which these global names mean these; all else is as it is, live."""
    names = _Names(function.__globals__, others)
    same = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    same.__kwdefaults__ = function.__kwdefaults__
    return same


def _is_one(args: Any, kwargs: Any) -> bool:
    return len(args) == 1 and not kwargs


def _keep_nothing(modules: Iterable[torch.nn.Module]) -> bool:
    """Whether all in them are layers of which it is known that nobody else has their results."""
    from torch import nn

    return all(
        type(part).__module__.partition(".")[0] in LAYERS and type(part) is not nn.Identity
        for module in modules
        for part in module.modules()
    )


def _are_nobodys(one: Any, other: Any) -> bool:
    """Whether a kernel may write over both."""
    apart = one.data_ptr() != other.data_ptr()
    return apart and liger.is_nobodys(one) and liger.is_nobodys(other)


def _may_write_over(gate: Any, up: Any) -> bool:
    """Their gradients take their places."""
    fits = liger.takes(gate, up) and gate.shape == up.shape and gate.dtype == up.dtype
    return fits and _are_nobodys(gate, up)


def _is_as_torchs(norm: Any, x: Any, weight: Any) -> bool:
    """Whether dtype and eps are sure to be torch's: autocast has rules for its norm, and so has
    that for an eps of None.
    """
    import torch

    has_rules = torch.is_autocast_enabled(x.device.type) or norm.eps is None
    return x.dtype == weight.dtype and (x.dtype == torch.float32 or not has_rules)


def _promoted(*tensors: Any) -> torch.dtype:
    """What a product of these is of: under autocast weights and angles are float32."""
    import torch

    return torch.promote_types(*(tensor.dtype for tensor in tensors))


def _is_watched(module: Any) -> bool:
    hooks = (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
    return bool(hooks) or "forward" in module.__dict__

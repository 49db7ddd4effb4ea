"""The calls of modules that Liger has a kernel for, around what they compute otherwise.

Where anything else wants to see the inside of such a module, or has put something there, it runs as
ever: hooks, another forward on the instance, a compiler. So do inputs that no kernel takes.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from speedkit_jupyter.optimizations.properties.calls import Call
from speedkit_jupyter.optimizations.properties.hooks import is_watched
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.thread_origin import is_for_here

if TYPE_CHECKING:
    import torch

NAME = "fused_kernels"
# Whose layers keep nothing of their results but what autograd knows of.
LAYERS = {"torch", "transformers"}


class Fused(Call):
    """The calls of one module, by the kernels of `functional`; `how` is how those are called."""

    kind: ClassVar[str] = ""

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

        alone = self.inner is None or isinstance(self.inner, Fused)
        is_as_known = type(self.module).forward is self._own
        here = is_for_here(self.only_in)
        if self._failed or not (here and alone and is_as_known) or torch.compiler.is_compiling():
            return False
        return not any(map(is_watched, self.module.modules())) and not module._has_any_global_hook()

    def _give_up(self, error: Exception) -> None:
        self._failed = True
        first = (str(error).splitlines() or [""])[0]
        name = type(self.module).__name__
        note = f"Liger's {self.kind} failed, so {name} runs as before: {first}"
        if self._notes.get(NAME) != note:
            self._notes[NAME] = note
            warnings.warn(f"{note} (%speedkit report)", stacklevel=4)


def is_one(args: Any, kwargs: Any) -> bool:
    """Whether one tensor is given, and nothing else."""
    return len(args) == 1 and not kwargs


def keep_nothing(modules: Iterable[torch.nn.Module]) -> bool:
    """Whether all in them are layers of which it is known that nobody else has their results."""
    from torch import nn

    return all(
        type(part).__module__.partition(".")[0] in LAYERS and type(part) is not nn.Identity
        for module in modules
        for part in module.modules()
    )

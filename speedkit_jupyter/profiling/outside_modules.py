"""Operations that no module makes: of a loss that is a function, or of a model that is one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from speedkit_jupyter.profiling.split import Look, Part, Split


class Outside:
    """Tells a `split` what is computed outside of all other parts.

    What leads to a gradient is forward; what does not (a metric) stays the rest. `stepping` are the
    ids of the optimizers whose step is under way.
    """

    def __init__(self, split: Split) -> None:
        self.split = split
        self.stepping: set[int] = set()
        self._mode: Any = None

    @contextmanager
    def within(self, part: Part) -> Iterator[None]:
        """The block is this part, and nothing of ours is between torch and its functions.

        Not where the split does not run: an iterator outlives the step.
        """
        if not self.split.depth or self.split.hides(part):
            yield
            return
        with self.split.within(part), self.set_aside():
            yield

    @contextmanager
    def seen(self) -> Iterator[None]:
        """In the block. Not for a step that was compiled: it would be compiled anew for the mode.

        To be entered once what stands in for methods of tensors is in place.
        """
        import torch
        from torch.overrides import TorchFunctionMode

        split = self.split
        # torch finds a method by its name, and so what stands in for it, again.
        methods = {
            method: method.stands_in_for
            for method in vars(torch.Tensor).values()
            if hasattr(method, "stands_in_for")
        }

        class Seen(TorchFunctionMode):
            def __torch_function__(
                self, function: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                function = methods.get(function, function)
                if split.part != "rest":
                    return function(*args, **(kwargs or {}))
                mark, looks = split.mark_between(), list[Look]()
                split.undecided = looks
                try:
                    result = function(*args, **(kwargs or {}))
                finally:
                    split.undecided = None
                if isinstance(result, torch.Tensor) and result.requires_grad:
                    split.moved(mark, "forward")
                    for look in looks:
                        look.part = "forward"
                return result

        with Seen() as self._mode:
            yield
        self._mode = None

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """In the block torch knows nothing of it, where no other mode lies on top."""
        import torch

        top = torch._C._len_torch_function_stack() - 1
        mode = self._mode
        if mode is None or top < 0 or torch._C._get_function_stack_at(top) is not mode:
            yield
            return
        torch._C._pop_torch_function_stack()
        try:
            yield
        finally:
            torch._C._push_on_torch_function_stack(mode)

"""Tells a split what is computed, also by operations that no module makes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from speedkit_jupyter.profiling.split import LineSample, Part, Split
from speedkit_jupyter.support.torch_private import innermost_function_mode

# What `begin` returns where no part has begun.
NOTHING = object()


class Recorder:
    """Tells a `split` which part begins and ends, and what is computed outside of all.

    `stepping` are the ids of the optimizers whose step is under way.
    """

    def __init__(self, split: Split) -> None:
        self.split = split
        self.stepping: set[int] = set()
        self._mode: Any = None

    def begin(self, part: Part) -> Any:
        """Begin this part, with nothing of ours between torch and its functions; `end` takes what
        it returns. What both take is "overhead".

        Nothing begins where the split does not run (an iterator outlives the step), or hides it.
        """
        split = self.split
        if not split.depth or split.hides(part):
            return NOTHING
        split.enter("overhead")
        mode = self._pop()
        split.enter(part)
        return mode

    def end(self, begun: Any) -> None:
        """End the part that `begin` has begun."""
        if begun is NOTHING:
            return
        self.split.leave()
        self._push(begun)
        self.split.leave()

    @contextmanager
    def within(self, part: Part) -> Iterator[None]:
        """Count the block as this part."""
        begun = self.begin(part)
        try:
            yield
        finally:
            self.end(begun)

    @contextmanager
    def functions(self) -> Iterator[None]:
        """See torch's functions between the parts: what leads to a gradient (a loss that is a
        function) is forward, what does not (a metric) stays the rest.

        Not for a step that was compiled: it would be compiled anew for the mode. To be entered once
        what stands in for methods of tensors is in place.
        """
        import torch
        from torch.overrides import TorchFunctionMode

        recorder = self
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
                function, split = methods.get(function, function), recorder.split
                if split.part != "rest":
                    return function(*args, **(kwargs or {}))
                mark, samples = split.mark(), list[LineSample]()
                split.undecided = samples
                try:
                    result = function(*args, **(kwargs or {}))
                finally:
                    split.undecided = None
                if isinstance(result, torch.Tensor) and result.requires_grad:
                    split.moved(mark, "forward")
                    for sample in samples:
                        sample.part = "forward"
                return result

        with Seen() as self._mode:
            yield
        self._mode = None

    def _pop(self) -> Any:
        """Take the mode off torch's stack, where no other mode lies on top."""
        mode = self._mode
        if mode is None or innermost_function_mode() is not mode:
            return None
        mode.__exit__(None, None, None)
        return mode

    def _push(self, mode: Any) -> None:
        if mode is not None:
            mode.__enter__()

"""Patches that tell a split which part of the step begins and ends, in one thread.

Nothing is traced: the parts are few and long, so that a step takes hardly longer.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.measure.checks import compilations
from speedkit_jupyter.measure.rounds.confinement import optimizer_hooks, patched
from speedkit_jupyter.measure.undo.handlers.iterators import Replay
from speedkit_jupyter.profiling.lines import is_torchs, user_spot
from speedkit_jupyter.profiling.split import Line, LineSample, Part, Split

if TYPE_CHECKING:
    import torch

# Each of them waits until the device has done all that was asked of it before, and what waits in
# the code is `float(loss)` where the method is `__float__`.
WAITING = (
    "item",
    "tolist",
    "numpy",
    "__array__",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
    "__format__",
    "__repr__",
    "nonzero",
)
MOVING = ("to", "cuda", "cpu")

# What `begin` returns where no part has begun.
NOTHING = object()


class Recorder:
    """Tells a `split` which part begins and ends, and what is computed outside of all."""

    def __init__(self, split: Split) -> None:
        self.split = split
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
        import torch

        top = torch._C._len_torch_function_stack() - 1
        mode = self._mode
        if mode is None or top < 0 or torch._C._get_function_stack_at(top) is not mode:
            return None
        return torch._C._pop_torch_function_stack()

    def _push(self, mode: Any) -> None:
        import torch

        if mode is not None:
            torch._C._push_on_torch_function_stack(mode)


@contextmanager
def installed(recorder: Recorder) -> Iterator[None]:
    """Have torch's functions that are a whole part tell of their calls from this thread in the
    block, while the split runs.

    For many calls at once: Python (3.13) forgets for ever how to find the methods of a class
    quickly that was changed a thousand times.
    """
    import torch
    from torch.nn.utils import clip_grad
    from torch.utils.data import DataLoader
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    scaler, optimizer = torch.amp.GradScaler, torch.optim.Optimizer
    whole: list[tuple[Any, str, Part]] = [
        (DataLoader, "__iter__", "data"),
        (_BaseDataLoaderIter, "__next__", "data"),
        (Replay, "_draw", "data"),
        (torch.autograd, "backward", "backward"),
        (torch.autograd, "grad", "backward"),
        (optimizer, "zero_grad", "optimizer"),
        (torch.nn.Module, "__call__", "forward"),
        (scaler, "step", "optimizer"),
        (scaler, "unscale_", "optimizer"),
        (scaler, "update", "optimizer"),
        *((home, "clip_grad_norm_", "optimizer") for home in (clip_grad, torch.nn.utils)),
    ]
    _fill_tables()
    with ExitStack() as stack:
        for owner, name, part in whole:
            make = partial(counted, part, recorder)
            stack.enter_context(patched(owner, name, make))
        yield


@contextmanager
def installed_within(recorder: Recorder) -> Iterator[None]:
    """Have methods that wait, or move, tell of their calls: within those parts, or between them."""
    import torch

    with ExitStack() as stack:
        for name in WAITING:
            make = partial(_waiting, name, recorder)
            stack.enter_context(patched(torch.Tensor, name, make))
        for name in MOVING if _has_accelerator() else ():
            make = partial(_moving, recorder, name)
            stack.enter_context(patched(torch.Tensor, name, make))
        yield


@contextmanager
def told(recorder: Recorder, sees_functions: bool) -> Iterator[None]:
    """Tell of compiling, of hooked steps and of functions between the parts in the block, which is
    one call of the step. Between calls hooks and modes are put back.

    Not `sees_functions` in the first call, which may compile: there they are part of the rest.
    """
    with ExitStack() as stack:
        stack.enter_context(_compiling(recorder))
        if sees_functions and not compilations.graphs():
            stack.enter_context(recorder.functions())
        stack.enter_context(_steps(recorder))
        yield


def counted(part: Part, recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    """Count all of the call as this part."""

    def call(*args: Any, **kwargs: Any) -> Any:
        begun = recorder.begin(part)
        try:
            return original(*args, **kwargs)
        finally:
            recorder.end(begun)

    return call


def _waiting(name: str, recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    """Tell of a method that waits for the device, and gives Python a value.

    On a CPU nothing waits: there it counts where the user's code asks, and not torch's own.
    """

    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        split = recorder.split
        if split.part in ("synchronizations", "data", "compiling", "overhead") or (
            tensor.device.type == "cpu" and is_torchs(sys._getframe(2).f_code.co_filename)
        ):
            return original(tensor, *args, **kwargs)
        split.enter("overhead")
        line = _line(name)
        begun = recorder.begin("synchronizations")
        mark = split.mark()
        try:
            return original(tensor, *args, **kwargs)
        finally:
            seconds = split.mark() - mark
            recorder.end(begun)
            if line is not None:
                split.waited(line, seconds)
            split.leave()

    return call


def _moving(recorder: Recorder, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Tell of a copy to a device, or from there, which waits."""

    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        split = recorder.split
        if not split.depth:
            return original(tensor, *args, **kwargs)
        mark, begun_s = split.mark(), split.now()
        result = original(tensor, *args, **kwargs)
        before, after = tensor.device.type, result.device.type
        if before == after:
            return result
        part: Part = "synchronizations" if after == "cpu" else "host to device"
        split.moved(mark, part)
        if after == "cpu" and (line := _line(name)) is not None:
            split.waited(line, split.now() - begun_s)
        return result

    return call


def _line(call: str) -> Line | None:
    spot = user_spot(3)
    return None if spot is None else Line(*spot, call)


@contextmanager
def _steps(recorder: Recorder) -> Iterator[None]:
    """Count the steps of optimizers, whoever calls them, and of what they call the outermost."""
    open_steps: list[tuple[int, Any]] = []

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        open_steps.append((id(optimizer), recorder.begin("optimizer")))

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if open_steps:
            which, begun = open_steps.pop()
            recorder.end(begun)
            if which not in [one for one, _ in open_steps]:
                recorder.split.stepped[which] += 1

    with optimizer_hooks(before, after):
        yield


def _fill_tables() -> None:
    """Have torch make its tables of functions before ours stand in for some of them."""
    import torch.overrides

    torch.overrides.get_overridable_functions()
    torch.overrides.is_tensor_method_or_property(torch.Tensor.item)


@contextmanager
def _compiling(recorder: Recorder) -> Iterator[None]:
    """Tell of torch.compile at work, also on a backward pass when that comes first."""
    from torch._dynamo.callback import callback_handler

    here, depths = threading.get_ident(), list[int]()

    def start(_: Any) -> None:
        if threading.get_ident() == here:
            depths.append(recorder.split.depth)
            recorder.split.enter("compiling")

    def end(_: Any) -> None:
        if depths and threading.get_ident() == here:
            recorder.split.leave(depths.pop())

    callback_handler.register_start_callback(start)
    callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(start)
        callback_handler.remove_end_callback(end)


def _has_accelerator() -> bool:
    import torch

    return bool(torch.accelerator.is_available())

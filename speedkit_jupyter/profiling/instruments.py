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
from speedkit_jupyter.profiling.recorder import Recorder
from speedkit_jupyter.profiling.split import Line, Part
from speedkit_jupyter.support import torch_private

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

    scaler, optimizer = torch.amp.GradScaler, torch.optim.Optimizer
    whole: list[tuple[Any, str, Part]] = [
        (DataLoader, "__iter__", "data"),
        (torch_private.loader_iterator(), "__next__", "data"),
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
    with ExitStack() as stack:
        stack.enter_context(_overrides_forgotten())
        for owner, name, part in whole:
            make = partial(counted, part, recorder)
            stack.enter_context(patched(owner, name, make))
        for kind in {*_optimizers()}:
            make = partial(_step_of_optimizer, recorder)
            stack.enter_context(patched(kind, "step", make))
        yield


@contextmanager
def installed_within(recorder: Recorder) -> Iterator[None]:
    """Have methods that wait, or move, tell of their calls: within those parts, or between them."""
    import torch

    with ExitStack() as stack:
        stack.enter_context(_overrides_forgotten())
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
        stack.enter_context(_unseen_steps(recorder))
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


def _optimizers() -> Iterator[type[torch.optim.Optimizer]]:
    """Yield the classes of optimizers whose `step` torch has put its hooks around: it does so once
    the first one is made. Of others (a wrapper's, a parent's) nothing is changed:
    what steps in there is hooked, or is seen by the hooks of all optimizers.
    """
    import torch

    waiting: list[type[torch.optim.Optimizer]] = [torch.optim.Optimizer]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if getattr(vars(kind).get("step"), "hooked", False):
            yield kind


def _step_of_optimizer(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    """Count all of a step as the optimizer's, its hooks included."""
    whole, seen = counted("optimizer", recorder, original), recorder.stepping

    def call(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        stepped = recorder.split.stepped
        before, is_first = stepped[id(optimizer)], id(optimizer) not in seen
        seen.add(id(optimizer))
        try:
            result = whole(optimizer, *args, **kwargs)
        finally:
            if is_first:
                seen.discard(id(optimizer))
        stepped[id(optimizer)] = before + 1  # also where its class calls the one that it is of
        return result

    return call


@contextmanager
def _unseen_steps(recorder: Recorder) -> Iterator[None]:
    """Tell of steps that do not go by their class: a scheduler puts a step of its own on the
    optimizer, which calls what it found when the scheduler was made.
    """
    depths: dict[int, int] = {}

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if recorder.split.depth and id(optimizer) not in recorder.stepping:
            depths[id(optimizer)] = recorder.split.depth
            recorder.split.enter("optimizer")

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) in depths:
            recorder.split.leave(depths.pop(id(optimizer)))
            recorder.split.stepped[id(optimizer)] += 1

    with optimizer_hooks(before, after):
        yield


@contextmanager
def _overrides_forgotten() -> Iterator[None]:
    """Keep what stands in for torch's functions out of the tables that torch makes of its own, once
    in a process: those that are first asked for in the block are made anew after it.
    """
    import torch.overrides

    torch.overrides.get_overridable_functions()
    torch.overrides.is_tensor_method_or_property(torch.Tensor.item)
    before = {id(table): table.cache_info().misses for table in torch_private.lookups()}
    try:
        yield
    finally:
        for table in torch_private.lookups():
            if table.cache_info().misses > before.get(id(table), 0):
                table.cache_clear()


@contextmanager
def _compiling(recorder: Recorder) -> Iterator[None]:
    """Tell of torch.compile at work, also on a backward pass when that comes first."""
    here, depths = threading.get_ident(), list[int]()

    def start(_: Any) -> None:
        if threading.get_ident() == here:
            depths.append(recorder.split.depth)
            recorder.split.enter("compiling")

    def end(_: Any) -> None:
        if depths and threading.get_ident() == here:
            recorder.split.leave(depths.pop())

    remove = torch_private.on_compiling(start, end)
    try:
        yield
    finally:
        remove()


def _has_accelerator() -> bool:
    import torch

    return bool(torch.accelerator.is_available())

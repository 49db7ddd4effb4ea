"""What tells a split which part of the step begins and ends: all its patches, of one thread.

Nothing is traced: the parts are few and long, so that a step takes hardly longer for it.
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
from speedkit_jupyter.measure.undo.iterator_stand_in import Replay
from speedkit_jupyter.profiling import remembered, user_lines
from speedkit_jupyter.profiling.outside_modules import Outside
from speedkit_jupyter.profiling.split import Line, Part, Split

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
def installed(outside: Outside) -> Iterator[None]:
    """In the block functions of torch's that are a part as a whole tell its split of their calls
    from this thread, while it runs.

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
    with ExitStack() as stack:
        stack.enter_context(remembered.forgotten())
        for owner, name, part in whole:
            make = partial(counted, part, outside)
            stack.enter_context(patched(owner, name, make))
        for kind in {*_optimizers()}:
            make = partial(_step_of_optimizer, outside)
            stack.enter_context(patched(kind, "step", make))
        yield


@contextmanager
def installed_within(outside: Outside) -> Iterator[None]:
    """The same of what happens within them, or between them: methods that wait, or move."""
    import torch

    with ExitStack() as stack:
        stack.enter_context(remembered.forgotten())
        for name in WAITING:
            make = partial(_waiting, name, outside)
            stack.enter_context(patched(torch.Tensor, name, make))
        for name in MOVING if _has_accelerator() else ():
            make = partial(_moving, outside.split, name)
            stack.enter_context(patched(torch.Tensor, name, make))
        yield


@contextmanager
def told(outside: Outside, sees_functions: bool) -> Iterator[None]:
    """In the block, one call of the step, its split is told of what is in no function's hands; to
    be entered once those are installed. Between calls hooks and modes are put back.

    `sees_functions` of torch's between the parts. Not in the first call of a step, which may
    compile: there they are part of the rest.
    """
    with ExitStack() as stack:
        stack.enter_context(_compiling(outside.split))
        if sees_functions and not compilations.graphs():
            stack.enter_context(outside.seen())
        stack.enter_context(_unseen_steps(outside.split, outside.stepping))
        yield


def counted(part: Part, outside: Outside, original: Callable[..., Any]) -> Callable[..., Any]:
    """All of the call is this part."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if outside.split.hides(part):  # at each layer's call: without a context for nothing
            return original(*args, **kwargs)
        with outside.within(part):
            return original(*args, **kwargs)

    return call


def _waiting(name: str, outside: Outside, original: Callable[..., Any]) -> Callable[..., Any]:
    """A method that waits for the device, and gives Python a value.

    On a CPU nothing waits: there it counts where the user's code asks, and not torch's own.
    """

    split, passed, original = outside.split, outside.split.passed, _as_torch_calls(original)

    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        part = split.part
        if part in ("synchronizations", "data", "compiling", "ours"):
            passed[part] += 1
            return original(tensor, *args, **kwargs)
        is_torchs = user_lines.is_torchs(sys._getframe(2).f_code.co_filename)
        if is_torchs and tensor.device.type == "cpu":
            passed[part] += 1
            return original(tensor, *args, **kwargs)
        with split.telling(), outside.set_aside():
            line, before_s = _line(name), split.seconds["synchronizations"]
            split.enter("synchronizations")
            try:
                return original(tensor, *args, **kwargs)
            finally:
                split.leave()
                if line is not None:
                    split.waited(line, split.seconds["synchronizations"] - before_s)

    return call


def _as_torch_calls(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch finds a method of a tensor by its name, and so what stands in for it: a subclass that
    has its own `__torch_function__` is told of the original here.
    """
    import torch

    plain, enabled = (torch.Tensor, torch.nn.Parameter), torch._C._is_torch_function_enabled
    usual = torch.Tensor.__torch_function__.__func__  # type: ignore[attr-defined]

    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        kind: Any = type(tensor)
        if kind in plain or not enabled():
            return original(tensor, *args, **kwargs)
        own = getattr(kind.__torch_function__, "__func__", usual)  # none of its own: torch's
        if own is usual:
            return original(tensor, *args, **kwargs)
        return kind.__torch_function__(original, (kind,), (tensor, *args), kwargs)

    return call


def _moving(split: Split, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """To a device, or from there, which waits; or neither."""

    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
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
    frame = user_lines.user_frame(3)
    return None if frame is None else Line(frame.f_code.co_filename, frame.f_lineno, call)


def _optimizers() -> Iterator[type[torch.optim.Optimizer]]:
    """Every class of optimizers that says how it steps, and that torch has put its hooks around: it
    does so once the first one is made. Of others (a wrapper's, a parent's) nothing is changed:
    what steps in there is hooked, or is seen by the hooks of all optimizers.
    """
    import torch

    waiting: list[type[torch.optim.Optimizer]] = [torch.optim.Optimizer]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if getattr(vars(kind).get("step"), "hooked", False):
            yield kind


def _step_of_optimizer(outside: Outside, original: Callable[..., Any]) -> Callable[..., Any]:
    """All of a step, its hooks included."""
    whole, stepped = counted("optimizer", outside, original), outside.split.stepped
    seen = outside.stepping

    def call(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
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
def _unseen_steps(split: Split, seen: set[int]) -> Iterator[None]:
    """Those that do not go by their class: a scheduler puts a step of its own on the optimizer, and
    that calls what it found when the scheduler was made.
    """
    depths: dict[int, int] = {}

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if split.depth and id(optimizer) not in seen:
            depths[id(optimizer)] = split.depth
            split.enter("optimizer")

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) in depths:
            split.leave(depths.pop(id(optimizer)))
            split.stepped[id(optimizer)] += 1

    with optimizer_hooks(before, after):
        yield


@contextmanager
def _compiling(split: Split) -> Iterator[None]:
    """torch.compile at work, also on a backward pass when that comes first."""
    from torch._dynamo.callback import callback_handler

    here, depths = threading.get_ident(), list[int]()

    def start(_: Any) -> None:
        if threading.get_ident() == here:
            depths.append(split.depth)
            split.enter("compiling")

    def end(_: Any) -> None:
        if depths and threading.get_ident() == here:
            split.leave(depths.pop())

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

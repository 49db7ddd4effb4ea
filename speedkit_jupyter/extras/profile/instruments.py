"""Patches by which a recorder learns which part of the step begins and ends, in one thread.

Nothing is traced: the parts are few and long, so that a step takes hardly longer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.utils import clip_grad
from torch.utils.data import DataLoader

from speedkit_jupyter.extras.profile.split import Line, Part, Recorder
from speedkit_jupyter.rounds import compilations
from speedkit_jupyter.state.handlers.iterators import Replay
from speedkit_jupyter.support.source_lines import Spot, is_users, user_spot
from speedkit_jupyter.torchglue import dynamo as torch_private
from speedkit_jupyter.torchglue.confinement import optimizer_hooks, patched
from speedkit_jupyter.torchglue.modules import loader_iterator

# Each waits until the device has done all that it was asked for.
WAITING = (
    "item", "tolist", "numpy", "nonzero", "__array__", "__bool__", "__float__", "__int__",
    "__index__", "__format__", "__repr__",
)  # fmt: skip
MOVING = ("to", "cuda", "cpu")


@contextmanager
def installed(recorder: Recorder, within: bool = False) -> Iterator[None]:
    """Have torch's functions that are a whole part tell of their calls in the block; `within` them
    methods that wait, or move, too.

    For many calls at once: Python 3.13 forgets for ever how to find methods quickly in a class that
    was changed a thousand times.
    """
    whole: list[tuple[Any, str, Part]] = [
        (DataLoader, "__iter__", "data"),
        (loader_iterator(), "__next__", "data"),
        (Replay, "_draw", "data"),
        (torch.autograd, "backward", "backward"),
        (torch.autograd, "grad", "backward"),
        (torch.optim.Optimizer, "zero_grad", "optimizer"),
        (torch.nn.Module, "__call__", "forward"),
        *((torch.amp.GradScaler, name, "optimizer") for name in ("step", "unscale_", "update")),
        *((home, "clip_grad_norm_", "optimizer") for home in (clip_grad, torch.nn.utils)),
    ]
    patches = [(owner, name, partial(_counted, recorder, part)) for owner, name, part in whole]
    if within:
        moving = MOVING if torch.accelerator.is_available() else ()
        methods = [*((name, _waiting) for name in WAITING), *((name, _moving) for name in moving)]
        patches += [(torch.Tensor, name, partial(make, recorder, name)) for name, make in methods]
    # torch makes tables of its functions once in a process: those made in the block are made anew.
    before = {id(table): table.cache_info().misses for table in torch_private.override_caches()}
    try:
        with ExitStack() as stack:
            for owner, name, make in patches:
                stack.enter_context(patched(owner, name, make))
            yield
    finally:
        for table in torch_private.override_caches():
            if table.cache_info().misses > before.get(id(table), 0):
                table.cache_clear()


@contextmanager
def told(recorder: Recorder, sees_functions: bool) -> Iterator[None]:
    """Tell of compiling, optimizers' steps and functions between the parts, in one call of the
    step. Not `sees_functions` in a first call, which may compile: they are part of the rest there.
    """
    with ExitStack() as stack:
        open_compilations: list[Any] = []
        stack.callback(
            torch_private.on_compiling(
                lambda _: open_compilations.append(recorder.begin("compiling")),
                lambda _: recorder.end(open_compilations.pop() if open_compilations else None),
            )
        )
        if sees_functions and not compilations.graphs():
            stack.enter_context(recorder.functions())
        stack.enter_context(_optimizer_steps(recorder))
        yield


def _counted(recorder: Recorder, part: Part, original: Callable[..., Any]) -> Callable[..., Any]:
    """Count all of the call as this part."""

    def call(*args: Any, **kwargs: Any) -> Any:
        begun = recorder.begin(part)
        try:
            return original(*args, **kwargs)
        finally:
            recorder.end(begun)

    return call


def _waiting(recorder: Recorder, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Tell of a method that waits for the device; on a CPU where the user's own code asks."""

    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if recorder.part in ("synchronizations", "data", "compiling", "overhead") or (
            tensor.device.type == "cpu" and not is_users(sys._getframe(2).f_code.co_filename)
        ):
            return original(tensor, *args, **kwargs)
        with recorder.within("overhead"):
            spot = user_spot(2)
            begun = recorder.begin("synchronizations")
            mark = recorder.mark()
            try:
                return original(tensor, *args, **kwargs)
            finally:
                waited_s = recorder.mark() - mark
                recorder.end(begun)
                _note(recorder, spot, name, waited_s)

    return call


def _moving(recorder: Recorder, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Tell of a copy to a device, or from there, which waits."""

    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if recorder.part == "overhead":
            return original(tensor, *args, **kwargs)
        mark, begun_s = recorder.mark(), recorder.now()
        result = original(tensor, *args, **kwargs)
        before, after = tensor.device.type, result.device.type
        if after == "cpu" != before:
            recorder.moved(mark, "synchronizations")
            _note(recorder, user_spot(2), name, recorder.now() - begun_s)
        elif after != before:
            recorder.moved(mark, "host to device")
        return result

    return call


def _note(recorder: Recorder, spot: Spot | None, name: str, seconds: float) -> None:
    if spot is not None:
        recorder.split.waits[Line(*spot, name)] += 1
        recorder.split.waited_s[Line(*spot, name)] += seconds


@contextmanager
def _optimizer_steps(recorder: Recorder) -> Iterator[None]:
    """Count optimizers' steps; one that calls the step of its base class counts once."""
    under_way: list[tuple[int, Any]] = []

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        under_way.append((id(optimizer), recorder.begin("optimizer")))

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        of, begun = under_way.pop()
        recorder.end(begun)
        if of not in dict(under_way):
            recorder.split.stepped[of] += 1

    with optimizer_hooks(before, after):
        yield

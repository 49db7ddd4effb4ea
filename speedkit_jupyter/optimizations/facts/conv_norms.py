"""Which batch norms follow a convolution, and nothing else does: what can be folded together."""

from __future__ import annotations

import copy
import io
import random
import warnings
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    Pair = tuple[torch.nn.Module, torch.nn.Module]


def pairs(model: torch.nn.Module) -> list[Pair]:
    """Each convolution with the batch norm that takes its result, which nothing else takes.

    By torch.fx, which calls `forward` with stand-ins: on a copy without weights, so that the model
    sees nothing of it. What can't be traced is looked at by its parts.
    """
    if not number_of_norms([*model.modules()]):
        return []
    with _unseen():
        try:
            twin = _without_weights(model)
        except Exception:  # a model that can't be copied can't be looked into
            return []
        found = list(_found(twin, ""))
    named = [(model.get_submodule(conv), model.get_submodule(norm)) for conv, norm in found]
    times = Counter(id(module) for pair in named for module in pair)
    return [pair for pair in named if all(times[id(module)] == 1 for module in pair)]


def _found(module: torch.nn.Module, prefix: str) -> Iterator[tuple[str, str]]:
    """Paths of a convolution and its batch norm."""
    from torch import fx

    if not any(map(_is_norm, module.modules())):
        return
    try:
        graph = fx.Tracer().trace(module)
    except Exception:
        for name, child in module.named_children():
            yield from _found(child, f"{prefix}{name}.")
        return
    calls = [node for node in graph.nodes if node.op == "call_module"]
    times = Counter(id(module.get_submodule(str(node.target))) for node in calls)
    for node in calls:
        before = node.args[0] if len(node.args) == 1 and not node.kwargs else None
        if not isinstance(before, fx.Node) or before.op != "call_module":
            continue
        paths = str(before.target), str(node.target)
        conv, norm = map(module.get_submodule, paths)
        alone = len(before.users) == len(before.args) == 1
        once = times[id(conv)] == times[id(norm)] == 1
        if alone and once and _is_conv(conv) and _is_norm(norm):
            yield f"{prefix}{paths[0]}", f"{prefix}{paths[1]}"


def _is_conv(module: torch.nn.Module) -> bool:
    return type(module) in _convs()


@cache
def _convs() -> frozenset[type]:
    from torch import nn

    return frozenset((nn.Conv1d, nn.Conv2d, nn.Conv3d))


@cache
def _norms() -> frozenset[type]:
    from torch import nn

    return frozenset((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))


def _is_norm(module: torch.nn.Module) -> bool:
    return type(module) in _norms() and module._buffers.get("running_mean") is not None


def number_of_norms(modules: Collection[torch.nn.Module]) -> int:
    """Batch norms among a model's modules that might be folded; none without a convolution."""
    return sum(map(_is_norm, modules)) if any(map(_is_conv, modules)) else 0


def _without_weights(model: torch.nn.Module) -> torch.nn.Module:
    """A copy whose tensors have shapes and no memory."""
    import torch

    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        memo[id(tensor)] = torch.nn.Parameter(empty, False) if is_parameter else empty
    return copy.deepcopy(model, memo)


@contextmanager
def _unseen() -> Iterator[None]:
    """What the user's code prints, warns of or draws meanwhile is no part of any step."""
    import torch

    state = random.getstate()
    with (
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(),
        redirect_stdout(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            random.setstate(state)

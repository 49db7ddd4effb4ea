"""What can't be put back, in words: said before a step runs, and after it where it shows then."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from types import CodeType
from typing import Any

from speedkit_jupyter.measure.undo import graphs_in_float64
from speedkit_jupyter.measure.undo.graphs import Graphs
from speedkit_jupyter.measure.undo.isolation import State
from speedkit_jupyter.measure.undo.iterators import Replays
from speedkit_jupyter.measure.undo.kinds.code.spelled import Words
from speedkit_jupyter.measure.undo.kinds.files.mirrors import Loggers
from speedkit_jupyter.measure.undo.kinds.files.streams import Files
from speedkit_jupyter.measure.undo.kinds.objects.functions import Caches
from speedkit_jupyter.measure.undo.kinds.objects.opaque import Unknown
from speedkit_jupyter.measure.undo.kinds.tensors.memory import known_in_part
from speedkit_jupyter.measure.undo.kinds.tensors.randomness import is_empty
from speedkit_jupyter.measure.undo.walk import Walk

# So many names in a line.
MOST_NAMES = 5
# How code comes to the memory of a tensor.
STORAGES = frozenset(["untyped_storage", "storage", "_typed_storage", "UntypedStorage"])


def before(state: State, replays: Replays, calls: Sequence[str] = ()) -> list[str]:
    """A line for each reason why something that the step reaches can't be put back.

    `calls` are functions that it names and whose effect nobody can put back.
    """
    walk = state.walk
    named: dict[type, list[str]] = {Files: [], Unknown: [], Caches: [], Loggers: []}
    for instance in walk.found.values():
        for kind in walk.kinds(instance):
            if type(kind) in named and kind.beyond(instance):
                name = walk.name(instance)
                is_file = type(kind) in {Files, Loggers}
                named[type(kind)].append(name if is_file else f"{name} ({type(instance).__name__})")
    lines = [
        _line(
            replays.given_again,
            "drawn from, and can't be put back as it was: an object in its place gives the same "
            "again to whom draws with next()",
        ),
        _line(
            replays.not_begun,
            "yet to draw the order of its epoch: the next epoch's may be another than without the "
            "measurement; draw one batch before it",
        ),
        _line(
            replays.in_an_epoch,
            "in the middle of an epoch: where the step goes to its end, the next epoch's order may "
            "be another than without the measurement",
        ),
        _line(
            [*named[Files], *walk.mirrors, *named[Loggers]],
            "written to for real: that can't be put back",
        ),
        _line(
            replays.drawn,
            "drawn from for real: that can't be put back; in a variable of its own it would be",
        ),
        _line(
            named[Caches], "used for real: what a cache keeps can't be put back", verb=("is", "are")
        ),
        _line([*named[Unknown], *walk.running], "not looked into, and can't be put back"),
        _line(
            state.too_large(),
            "too large to copy, and can't be put back: watched, and named again if written to",
        ),
        _line(calls, "called in the step's code: what that does can't be put back"),
        *(f"{name} {why}, and can't be put back" for name, why in state.failed.items()),
    ]
    if walk.cut:
        lines.append(
            f"more than {len(walk.found):,} objects are reached: what lies behind "
            f"{walk.name(walk.cut[0])} can't be put back"
        )
    return [line for line in lines if line]


def of_graphs(graphs: Graphs, codes: Iterable[CodeType]) -> list[str]:
    """A line for graphs of before that the step uses, and one for those too large to go through."""
    lines = [
        _line(
            graphs.used(codes),
            "a graph of autograd from before, which the step uses: what it adds to that, or frees "
            "of it, can't be put back",
            verb=("has", "have"),
        ),
        _line(
            graphs.beyond(),
            "too large a graph of autograd to look through: gradients behind it can't be put back",
            verb=("has", "have"),
        ),
    ]
    return [line for line in lines if line]


def of_float64(walk: Walk, models: Sequence[Any]) -> list[str]:
    """A line for graphs of before that a check in float64 parts from the parameters."""
    line = _line(
        graphs_in_float64.names(walk, models),
        "a graph of autograd from before: after the check in float64 torch.autograd.grad() does "
        "not find the parameters from there, and backward() does",
        verb=("has", "have"),
    )
    return [line] if line else []


def of_words(walk: Walk, words: Words) -> list[str]:
    """Lines for what the step's words say that it may do, and which then can't be put back."""
    lines = []
    if "resize_" in words.named and not STORAGES.isdisjoint(words.named):
        names = map(walk.name, known_in_part(walk.found.values()))
        text = "a part of a memory that the step may give back: the rest of it can't be put back"
        lines.append(_line(names, text))
    if "set" in words.named and "reset" not in words.named:
        empty = [
            instance
            for instance in walk.found.values()
            if type(instance) is ContextVar and is_empty(instance)
        ]
        text = "without a value: what the step sets can't be taken away again, nor be put back"
        lines.append(_line(map(walk.name, empty), text))
    return [line for line in lines if line]


def after(state: State, replays: Replays, graphs: Graphs) -> list[str]:
    """What was changed all the same, and what putting back failed for."""
    theirs = "changed by another thread meanwhile, and left to it"
    written = state.written()
    lines = [_line(written, "changed by the step, and could not be put back", verb=("was", "were"))]
    driven = "driven by send(), throw() or close(): that can't be put back"
    lines.append(_line(replays.driven(), driven, verb=("was", "were")))
    lines.append(_line(state.meanwhile.line(state.walk), theirs))
    anew = "begun anew by the step, in the middle of an epoch: that can't be put back"
    lines.append(_line(replays.begun_anew(), anew, verb=("was", "were")))
    lines += [f"{name} {why}" for name, why in state.failed.items() if "put back" in why]
    lines += [f"{name} {why}, and could not be put back" for name, why in graphs.changed()]
    return [line for line in lines if line]


def _line(names: Iterable[str], text: str, verb: Sequence[Any] = ("is", "are")) -> str:
    labels = list(dict.fromkeys(names))
    if not labels:
        return ""
    more = f" and {len(labels) - MOST_NAMES} more" if len(labels) > MOST_NAMES else ""
    if len(labels) > 1:
        text = text.replace("as it was", "as they were").replace("in its place", "in each place")
    return f"{', '.join(labels[:MOST_NAMES])}{more} {verb[len(labels) > 1]} {text}"

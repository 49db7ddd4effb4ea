"""A real signal at every line of ours on the way out of a plan leaves nothing of it behind."""

from __future__ import annotations

import gc
import signal
import sys

import pytest
import torch
from torch import nn

from speedkit_jupyter import Hardware, SpeedConfig, apply_speedups
from speedkit_jupyter.optimizations.properties import memory_layout, overrides
from speedkit_jupyter.plans import applying, context, leaving, observed
from speedkit_jupyter.plans.applying import applied_to, prepare
from speedkit_jupyter.support import handlers, interrupts, registry

OURS = {
    one.__file__
    for one in (
        applying, context, handlers, interrupts, leaving, memory_layout, observed, overrides,
        registry,
    )
}  # fmt: skip


# At each line of ours, which takes half a minute for each way out; else at some of them.
EVERY = [pytest.param(41, id="some"), pytest.param(1, id="all", marks=pytest.mark.thorough)]


class Interrupts:
    """Sends `burst` signals, `gap` events apart, from the given event of our files on.

    One number after the other.
    """

    def __init__(self, at: int, burst: int, gap: int, *numbers: signal.Signals) -> None:
        self.numbers = numbers or (signal.SIGINT,)
        self.at, self.burst, self.gap = at, burst, gap
        self.events = self.sent = 0

    def __call__(self, frame, event, argument):
        """What sys.settrace calls."""
        if frame.f_code.co_filename not in OURS:
            return None
        self.events += 1
        due = self.events >= self.at and (self.events - self.at) % self.gap == 0
        if due and self.sent < self.burst:
            self.sent += 1
            signal.raise_signal(self.numbers[(self.sent - 1) % len(self.numbers)])
        return self


@pytest.fixture
def machine(monkeypatch):
    """Detected once; the search for optimizers need not look through all of torch each time.

    Nor is there anything to wait for after each of hundreds of bursts: they have ended.
    """
    monkeypatch.setattr(handlers, "QUIET_S", 0.002)
    found = Hardware.detect()
    monkeypatch.setattr(Hardware, "detect", classmethod(lambda cls: found))
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def leave_with(model, sender):
    with apply_speedups(model, SpeedConfig(sdpa="math", channels_last=True).alone())[1]:
        sys.settrace(sender)


def leave_prepared(model, sender):
    context = prepare(model, SpeedConfig(sdpa="math", channels_last=True).alone())
    with context.in_force():
        sys.settrace(sender)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize(("burst", "gap"), [(2, 5), (2, 1), (1, 1)])
@pytest.mark.parametrize("leave", [leave_with, leave_prepared])
def test_wherever_it_comes_the_plan_is_taken_back(machine, leave, burst, gap, every):
    model = nn.Conv2d(2, 2, 2)
    stride = model.weight.stride()
    counted = Interrupts(0, 0, 1)
    leave(model, counted)
    sys.settrace(None)
    for at in range(1, counted.events + 1, every):
        try:
            leave(model, Interrupts(at, burst, gap))
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        assert torch.backends.cuda.flash_sdp_enabled(), at
        assert model.weight.stride() == stride, at
        assert applied_to(model) is None, at
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class OutOfTime(Exception):
    """What a time-out raises."""


class Terminated(BaseException):
    """What no `except Exception` catches."""


def out_of_time(number, frame):
    raise OutOfTime


def terminated(number, frame):
    raise Terminated


@pytest.fixture
def raising_handlers():
    """As of a decorator with a time-out, of a scheduler that asks for a checkpoint."""
    names = {"SIGALRM": out_of_time, "SIGUSR1": out_of_time, "SIGTERM": terminated}
    mine = {getattr(signal, name): one for name, one in names.items() if hasattr(signal, name)}
    before = {number: signal.signal(number, handler) for number, handler in mine.items()}
    yield tuple(mine)
    now = {number: signal.getsignal(number) for number in mine}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert now == mine


def nested(sender):
    """Two models that share a part, one plan each, left in the order in which they came."""
    model = nn.Conv2d(2, 2, 2)
    wrapper = nn.Sequential(model, nn.Conv2d(2, 2, 2))
    weights = [model.weight, wrapper[1].weight]
    before = [one.stride() for one in weights]
    config = SpeedConfig(sdpa="math", channels_last=True).alone()
    contexts: list = []
    try:
        sys.settrace(sender)
        for one in (model, wrapper):
            contexts.append(apply_speedups(one, config)[1])
        for one in contexts:
            one.restore()
    except (OutOfTime, Terminated):
        pass
    finally:
        sys.settrace(None)
    return (model, wrapper), contexts, weights, before


def healed(model_and_more) -> None:
    """A second `restore()` finishes what was begun, also of what the caller never got."""
    models, contexts, weights, before = model_and_more
    for one in contexts:
        one.restore()
    for model in models:
        while (left := applied_to(model)) is not None:
            left.restore()
    assert [one.stride() for one in weights] == before
    assert torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("gap", [3, 1])
@pytest.mark.parametrize("leave", [leave_with, leave_prepared])
def test_what_any_handler_raises_leaves_nothing_of_a_plan(machine, raising_handlers, leave, gap):
    model = nn.Conv2d(2, 2, 2)
    stride = model.weight.stride()
    counted = Interrupts(0, 0, 1)
    leave(model, counted)
    sys.settrace(None)
    for at in range(1, counted.events + 1, 23):
        first = at % len(raising_handlers)
        numbers = (*raising_handlers[first:], *raising_handlers[:first])
        try:
            leave(model, Interrupts(at, 2 if gap == 3 else 1, gap, *numbers))
        except (OutOfTime, Terminated):
            pass
        finally:
            sys.settrace(None)
        assert torch.backends.cuda.flash_sdp_enabled(), at
        assert model.weight.stride() == stride, at
        assert applied_to(model) is None, at


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("burst", [1, 2])
@pytest.mark.slow
def test_a_restore_that_a_time_out_ends_is_finished_by_the_next(machine, raising_handlers, burst):
    counted = Interrupts(0, 0, 1)
    healed(nested(counted))
    for at in range(1, counted.events + 1, 71):
        numbers = raising_handlers[at % len(raising_handlers) :]
        healed(nested(Interrupts(at, burst, 2, *numbers)))

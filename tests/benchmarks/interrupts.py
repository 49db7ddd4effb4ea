"""Ctrl-C once, twice and three times in a row at every line of ours: what is left behind.

A real SIGINT is raised where a line, a call or a return of SpeedKit's own code is traced, the
others of its burst a few events later. Then everything has to be as before: flags, threads, model,
gradients, optimizer, random generators, hooks, patches, handler of the signal, the iterator that
the step draws from; the caller has to see one KeyboardInterrupt, and measuring works again. What
comes on the very return of `apply_speedups` meets a plan that nobody has the context of: there
`restore_all()` has to leave all as before.

    python tests/benchmarks/interrupts.py [--seconds 60] [--bursts 1 2 3] [--only bench]

Each place is tried where it first comes, then at random other times, for so many seconds for each
of apply, restore, bench, tune and the magic. Prints a row for each; exits 1 where anything is left.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from io import StringIO
from typing import Any

# Before torch: on a busy machine two threads of so small a step would wait for each other awake.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from IPython.core.interactiveshell import InteractiveShell
from torch import nn

from speedkit_jupyter import Hardware, SpeedConfig, apply_speedups, benchmark, tune
from speedkit_jupyter.machines import flags
from speedkit_jupyter.measure.undo import guard
from speedkit_jupyter.plans.context import restore_all

PACKAGE, GAP = os.sep + "speedkit_jupyter" + os.sep, 7
PLAN = "threads:1+channels_last+fused_optimizer+sdpa:math"


class Work:
    """A model with all that a plan changes, and a step that draws from an iterator."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.1), nn.Flatten(), nn.Linear(16, 2)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.draws, self.log = iter(range(10**9)), []
        self.x = torch.randn(2, 3, 4, 4)
        self.context: Any = None

    def step(self) -> None:
        """Once forward, backward and on."""
        self.log.append(next(self.draws))
        self.model(self.x).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        """All that has to be as before, by name."""
        model, optimizer = self.model, self.optimizer
        values = hashlib.sha1()
        for one in (*model.state_dict().values(), torch.get_rng_state()):
            values.update(one.contiguous().numpy().tobytes())
        every = sys.modules["torch.optim.optimizer"]
        return {
            "values": values.hexdigest(),
            "strides": [one.stride() for one in model.parameters()],
            "gradients": [one.grad is None for one in model.parameters()],
            "optimizer": [sorted(k for k in g if k != "params") for g in optimizer.param_groups],
            "fused": [g["fused"] for g in optimizer.param_groups],
            "optimizer state": len(optimizer.state),
            "its names": sorted(optimizer.__dict__),
            "model's names": [sorted(one.__dict__) for one in model.modules()],
            "training": [one.training for one in model.modules()],
            "hooks": [
                len(one._forward_hooks) + len(one._forward_pre_hooks) + len(one._backward_hooks)
                for one in model.modules()
            ],
            "optimizers' hooks": len(optimizer._optimizer_step_pre_hooks)
            + len(optimizer._optimizer_step_post_hooks)
            + len(every._global_optimizer_pre_hooks)
            + len(every._global_optimizer_post_hooks),
            "patches": [torch.autograd.backward, torch.autograd.grad, nn.Module.__call__],
            "steps": [torch.optim.AdamW.step, optimizer.step.__func__],
            "flags": flags.snapshot(),
            "threads": torch.get_num_threads(),
            "autocast": torch.is_autocast_enabled("cpu"),
            "modes": torch._C._len_torch_dispatch_stack(),
            "gradient mode": torch.is_grad_enabled(),
            "collector": gc.isenabled(),
            "log": len(self.log),
            "iterator": type(self.draws).__name__,
            "a measurement": guard.in_progress(),
            "handler": signal.getsignal(signal.SIGINT),
        }


class Interrupts:
    """Sends `burst` signals, GAP events apart, from the event number `at` on."""

    def __init__(self, at: int, burst: int) -> None:
        self.at, self.burst, self.sent, self.events = at, burst, 0, 0
        self.first: dict[tuple[str, int, str], int] = {}
        self.handed_over = False  # one came when the plan was the caller's, who never got it

    def __call__(self, frame: Any, event: str, argument: Any) -> Any:
        """What sys.settrace calls."""
        code = frame.f_code
        if PACKAGE not in code.co_filename:
            return None
        self.events += 1
        self.first.setdefault((code.co_filename, frame.f_lineno, event), self.events)
        due = self.events >= self.at > 0 and (self.events - self.at) % GAP == 0
        if due and self.sent < self.burst:
            self.sent += 1
            self.handed_over |= event == "return" and code is apply_speedups.__code__
            signal.raise_signal(signal.SIGINT)
        return self


def _apply(work: Work) -> None:
    apply_speedups(work.model, CONFIG, optimizer=work.optimizer)


def _restore(work: Work) -> None:
    work.context.restore()


def _bench(work: Work) -> None:
    benchmark(
        work.step,
        f"baseline,{PLAN},bf16",
        model=work.model,
        optimizer=work.optimizer,
        budget_s=0.02,
    )


def _tune(work: Work) -> None:
    tune(work.step, model=work.model, optimizer=work.optimizer, budget_s=0.02, fresh=True)


def _magic(work: Work) -> None:
    with redirect_stdout(StringIO()):
        SHELL.user_ns.update(model=work.model, optimizer=work.optimizer, work=work)
        SHELL.run_cell_magic(
            "speedbench", f"--compare baseline,{PLAN} --budget 0.02", "work.step()"
        )


KINDS: dict[str, Callable[[Work], None]] = {
    "apply": _apply,
    "restore": _restore,
    "bench": _bench,
    "tune": _tune,
    "magic": _magic,
}
CONFIG = SpeedConfig(threads=1, channels_last=True, sdpa="math", fused_optimizer=True)


def trial(kind: str, at: int, burst: int) -> tuple[Interrupts, list[str]]:
    """One run; what of it was left behind."""
    work, problems = Work(), []
    before = work.state()
    if kind == "restore":
        work.context = apply_speedups(work.model, CONFIG, optimizer=work.optimizer)[1]
    interrupts, seen = Interrupts(at, burst), 0
    try:
        sys.settrace(interrupts)
        try:
            KINDS[kind](work)
        finally:
            sys.settrace(None)
    except KeyboardInterrupt:
        seen = 1
    except Exception as error:
        problems.append(f"{type(error).__name__}: {error}"[:90])
    if kind == "restore" and not work.context.restored:  # it came before the first line of it
        work.context.restore()
    if kind == "apply" and (not seen or interrupts.handed_over):
        restore_all()
    after = work.state()
    problems += [name for name in before if before[name] != after[name]]
    if interrupts.sent and not seen:
        problems.append("swallowed")
    restore_all()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if next(work.draws) != 0:
        problems.append("draws")
    return interrupts, problems


def tried(kind: str, burst: int, seconds: float) -> tuple[int, int, dict[str, list[str]]]:
    """Places known and tried, and the dirty ones by what they leave."""
    chance, end, dirty, number = random.Random(burst), time.perf_counter() + seconds, {}, 0
    trial(kind, 0, 0)  # what is imported, compiled, cached by the first run is no state
    known, _ = trial(kind, 0, 0)
    places = list(known.first.items())
    chance.shuffle(places)
    for (name, line, event), at in places:
        if time.perf_counter() > end:
            break
        interrupts, problems = trial(kind, at if chance.random() < 0.7 else at + GAP, burst)
        number += bool(interrupts.sent)
        if problems:
            where = f"{name.rpartition(PACKAGE)[2]}:{line} {event}"
            dirty.setdefault(", ".join(problems), []).append(where)
    return len(places), number, dirty


def main() -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--bursts", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", choices=list(KINDS))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(2)
    found = Hardware.detect()
    Hardware.detect = classmethod(lambda cls: found)  # not the subject, and it takes long
    SHELL.run_line_magic("load_ext", "speedkit_jupyter")
    gc.collect()
    gc.freeze()
    print("| run | burst | places | tried | dirty |\n| --- | --- | --- | --- | --- |")
    bad = 0
    for kind in [options.only] if options.only else KINDS:
        for burst in options.bursts:
            places, number, dirty = tried(kind, burst, options.seconds)
            count = sum(map(len, dirty.values()))
            bad += count
            print(f"| {kind} | {burst} | {places} | {number} | {count} |", flush=True)
            for what, where in dirty.items():
                print(f"  {what}: {len(where)}, {', '.join(where[:4])}", flush=True)
    return 1 if bad else 0


SHELL = InteractiveShell.instance()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as empty, suppress(BrokenPipeError):
        os.environ["SPEEDKIT_DATA"] = empty
        status = main()
    sys.exit(status)

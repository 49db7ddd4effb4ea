"""Random sequences of apply, train, load, replace and restore on overlapping models: what is left?

Each sequence plays on two worlds from one seed: three models that share layers and have several
optimizers. In one of them plans are applied and restored in any order, in the other never. At the
end all is compared bit by bit: values, strides, dtypes, settings, hooks, `__dict__` keys, flags.
The arithmetic is exact (multiples of 1/16 in float64, steps of powers of two), so that no layout,
kernel or number of threads may change a bit. Exits 1 where anything differs.

    python tests/benchmarks/undo_sequences.py [--sequences 10000] [--seed 0] [--save FILE]
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import random
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

# Before torch: the second thread of so small a layer waits asleep. Where others use the machine,
# waiting awake took nine of ten seconds.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from _ratios import machine
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from speedkit_jupyter import SpeedConfig, apply_speedups, restore_all
from speedkit_jupyter.machines import flags

WISHES: dict[str, tuple[Any, ...]] = {
    "channels_last": (True, True, False),
    "fused_optimizer": (True, True, False),
    "threads": (1, 2),
    "sdpa": ("math",),
    "tf32": ("medium", "highest"),
    "precision": ("bf16", "fp16"),
}
TOLD = 500  # sequences between two lines that say how far it is
OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, 2**-6, momentum=0.5),
    "foreach": lambda p: torch.optim.SGD(p, 2**-6, momentum=0.5, foreach=True),
    "fused": lambda p: torch.optim.SGD(p, 2**-6, momentum=0.5, fused=True),
    "plain": lambda p: torch.optim.SGD(p, 2**-6),
}


class World:
    """A part, a whole around it, another model that shares its first layer; their optimizers."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        part = nn.Sequential(nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Conv2d(3, 2, 1))
        whole = nn.Sequential(part, nn.ReLU(), nn.Conv2d(2, 2, 2), nn.Flatten(), nn.Linear(8, 2))
        other = nn.Sequential(part[0], nn.Conv2d(3, 2, 2), nn.Flatten())
        self.models = [part, whole, other]
        self.data = torch.Generator().manual_seed(seed)
        for model in self.models:
            model.double()
            for parameter in model.parameters():
                parameter.data = self.integers(parameter.shape) / 4
        self.x = self.integers((2, 2, 4, 4))
        groups = [part, whole, other, *draw.choices([part, whole, other], k=draw.randint(0, 1))]
        kinds = draw.choices(sorted(OPTIMIZERS), k=len(groups))
        made = zip(kinds, groups, strict=True)
        self.optimizers = [OPTIMIZERS[kind](one.parameters()) for kind, one in made]
        if draw.random() < 0.5:  # one for two models
            both = {id(p): p for p in (*whole.parameters(), *other.parameters())}
            self.optimizers.append(OPTIMIZERS["momentum"](list(both.values())))

    def integers(self, shape: Any) -> torch.Tensor:
        """Small ones, as float64."""
        return torch.randint(-3, 4, tuple(shape), generator=self.data).double()

    def train(self, model: int, optimizer: int) -> None:
        """A forward and backward pass of one model, and a step of one optimizer.

        All its parameters have gradients: torch's fused SGD takes no first momentum later on.
        """
        self.models[model](self.x).sum().backward()
        for group in self.optimizers[optimizer].param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        self.optimizers[optimizer].step()
        with torch.no_grad():  # few digits, whatever the number of steps
            for parameter in self.models[1].parameters():
                parameter.mul_(16).round_().div_(16).clamp_(-4, 4)
            for parameter in self.models[2].parameters():
                parameter.mul_(16).round_().div_(16).clamp_(-4, 4)

    def replace(self, model: int) -> None:
        """Another tensor in the place of the first weight, as after a cast that makes new ones."""
        layer = next(m for m in self.models[model].modules() if isinstance(m, nn.Conv2d))
        layer.weight = nn.Parameter(layer.weight.detach().clone())

    def cast(self, model: int) -> None:
        """To another dtype and back."""
        self.models[model].float().double()

    def add_group(self, optimizer: int) -> None:
        """A new parameter for an optimizer."""
        self.optimizers[optimizer].add_param_group({"params": [nn.Parameter(self.integers((2,)))]})

    def late_optimizer(self, model: int) -> None:
        """One that is made when plans may be in force already."""
        self.optimizers.append(
            torch.optim.SGD(self.models[model].parameters(), 2**-6, momentum=0.5)
        )

    def forget_gradients(self, model: int) -> None:
        """`zero_grad` of one model."""
        self.models[model].zero_grad()

    def left(self) -> dict[str, Any]:
        """All that undo promises, by kind; not what an optimizer keeps of weights that were
        replaced.
        """
        own = {id(p) for model in self.models for p in model.parameters()}
        tensors = [t for m in self.models for t in (*m.parameters(), *m.buffers())]
        tensors += [p.grad for m in self.models for p in m.parameters() if p.grad is not None]
        states = [s for o in self.optimizers for p, s in o.state.items() if id(p) in own]
        tensors += [v for s in states for v in s.values() if isinstance(v, torch.Tensor)]
        groups = [g for o in self.optimizers for g in (o.defaults, *o.param_groups)]
        modules = [part for model in self.models for part in model.modules()]
        return {
            "strides": [t.stride() for t in tensors],
            "dtypes and devices": [(t.dtype, t.device) for t in tensors],
            "values": [t.tolist() for t in tensors],
            "settings": [{k: v for k, v in g.items() if k != "params"} for g in groups],
            "module keys": [sorted(part.__dict__) for part in modules],
            "module classes": [type(part) for part in modules],
            "optimizer keys": [sorted(one.__dict__) for one in self.optimizers],
            "switches for GradScaler": [
                one.__dict__.get("_step_supports_amp_scaling") for one in self.optimizers
            ],
            "hooks": [
                (len(o._optimizer_step_pre_hooks), len(o._optimizer_load_state_dict_post_hooks))
                for o in self.optimizers
            ],
        }


def process() -> dict[str, Any]:
    """Every flag, the float32 ones with what they inherit, and torch's hooks for all optimizers."""
    return {
        "flags": dict(flags.snapshot()),
        "global hooks": len(_global_optimizer_pre_hooks),
        "overrides": len(flags.OVERRIDES._layers),
    }


def play(seed: int) -> tuple[list[str], list[str]]:
    """One sequence; returns the kinds in which anything differs, and what was done."""
    draw = random.Random(seed)
    plain, planned = World(seed), World(seed)
    before = process()
    contexts: list[Any] = []
    log: list[str] = []
    with ExitStack() as blocks:
        for _ in range(draw.randint(3, 14)):
            log.append(_move(draw, plain, planned, contexts, blocks))
        if draw.random() < 0.3:
            blocks.pop_all()  # left to be restored by hand
    draw.shuffle(contexts)
    if draw.random() < 0.2:
        restore_all()
    for context in contexts:
        context.restore()
    expected, found = plain.left() | before, planned.left() | process()
    return [kind for kind in expected if expected[kind] != found[kind]], log


def _move(
    draw: random.Random, plain: World, planned: World, contexts: list[Any], blocks: ExitStack
) -> str:
    worlds = (plain, planned)
    model = draw.randrange(len(plain.models))
    optimizer = draw.randrange(len(plain.optimizers))
    what = draw.choices(
        ("apply", "restore", "train", "load", "replace", "cast", "add_group", "late_optimizer",
         "forget_gradients", "restore_all"),
        (30, 18, 25, 5, 4, 4, 3, 4, 4, 3),
    )[0]  # fmt: skip
    if what == "apply":
        config = {name: draw.choice(v) for name, v in WISHES.items() if draw.random() < 0.5}
        given = draw.sample(planned.optimizers, draw.randint(0, len(planned.optimizers)))
        config = SpeedConfig.from_dict({**config, "alone": True})
        context = apply_speedups(planned.models[model], config, optimizer=given)[1]
        contexts.append(blocks.enter_context(context) if draw.random() < 0.2 else context)
    elif what == "restore" and contexts:
        contexts.pop(draw.randrange(len(contexts))).restore()
    elif what == "restore_all":
        restore_all()
    elif what == "train":
        for world in worlds:
            world.train(model, optimizer)
    elif what == "load":
        saved = copy.deepcopy(plain.optimizers[optimizer].state_dict())
        weights = copy.deepcopy(plain.models[model].state_dict())
        for world in worlds:
            world.optimizers[optimizer].load_state_dict(copy.deepcopy(saved))
            world.models[model].load_state_dict(weights)
    elif what == "add_group":
        for world in worlds:
            world.add_group(optimizer)
    elif what != "restore":
        for world in worlds:
            getattr(world, what)(model)
    return f"{what}({model}, {optimizer})"


def main() -> int:
    """Play them all, and say how many left anything."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sequences", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="write the result there, as JSON")
    arguments = parser.parse_args()
    restore_all()
    play(0)  # what is imported late is imported now
    gc.collect()
    gc.freeze()  # the search for optimizers need not look through all of torch each time
    start, kinds, failed = time.perf_counter(), Counter[str](), []
    for seed in range(arguments.seed, arguments.seed + arguments.sequences):
        differs, log = play(seed)
        kinds.update(differs)
        if differs:
            failed.append(seed)
            print(f"seed {seed}: {', '.join(differs)} after {', '.join(log)}", flush=True)
            restore_all()
        done = seed + 1 - arguments.seed
        if done % TOLD == 0:
            spent = time.perf_counter() - start
            print(f"{done} played, {len(failed)} differ, {spent:.0f} s", flush=True)
    result = {
        "machine": machine(),
        "torch": torch.__version__,
        "sequences": arguments.sequences,
        "first seed": arguments.seed,
        "differ": len(failed),
        "kinds": dict(kinds),
        "seconds": round(time.perf_counter() - start),
    }
    print(json.dumps(result, indent=2))
    if arguments.save:
        arguments.save.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

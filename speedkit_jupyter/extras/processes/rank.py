"""Run a cell in a worker (a rank); fail if another rank waits in a collective for this rank."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import joblib
import numpy as np
import torch

from speedkit_jupyter.extras.processes.packing import OWN, VALUES, Reader, reply
from speedkit_jupyter.extras.processes.sharding import is_sharded
from speedkit_jupyter.plans.context import SpeedContext, abandon, restore_all
from speedkit_jupyter.plans.registry import planned_models
from speedkit_jupyter.support.exceptions import in_a_line
from speedkit_jupyter.torchglue import private as torch_private
from speedkit_jupyter.torchglue.confinement import patched

# A cell fails if a rank waits this many seconds in a collective for a rank that has finished.
ALONE_S = 10.0
DESTROY = "destroy_process_group"


@dataclass
class Outcome:
    """A rank's report on a cell."""

    rank: int
    error: str = ""
    lines: list[str] = field(default_factory=list)  # IPython's traceback, or a waiting rank's stack
    values: dict[str, str] = field(default_factory=dict)  # reprs of numbers and strings by name
    stays: dict[str, str] = field(default_factory=dict)  # reasons why variables are not returned


def begin(rank: int, size: int) -> int:
    """Set up this process as a rank; return its process id."""
    torch.set_num_threads(max(1, joblib.cpu_count() // size))
    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    os.environ |= {name: str(value) for name, value in place.items()}
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    # An unpickled LR scheduler does not recognize the optimizer's `step` that it has wrapped.
    warnings.filterwarnings("ignore", r"Seems like `optimizer\.step\(\)` has been overridden")
    shell = sys.modules["IPython"].get_ipython()
    shell.user_ns.update(exit=sys.exit, quit=sys.exit)  # IPython's `exit` would end the worker
    shell.run_line_magic("load_ext", "speedkit_jupyter")
    return os.getpid()


def join(path: str, backend: str) -> None:
    """Leave any earlier process group; join a new one through a file, and wait for all ranks."""
    import torch.distributed as dist

    if dist.is_initialized():
        with suppress(RuntimeError):
            dist.destroy_process_group()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
    dist.init_process_group(backend, f"file://{path}", rank=rank, world_size=size, device_id=device)
    dist.barrier()


def run(folder: Path, source: str, bound: Collection[str], seed: int) -> Outcome:
    """Run a cell on the sent objects, then reset names and plans. Rank 0 also writes a reply."""
    shell = sys.modules["IPython"].get_ipython()
    outcome = Outcome(int(os.environ["RANK"]))
    space, shown = shell.user_ns, shell._showtraceback
    before, ended = dict(space), threading.Event()
    noted = folder, outcome.rank, threading.get_ident(), ended
    threading.Thread(target=_note_place, args=noted, daemon=True).start()
    # `_showtraceback` is IPython's hook for front ends that show errors elsewhere.
    shell._showtraceback = lambda kind, value, text: outcome.lines.extend(text)
    try:
        reader = Reader(folder / "sent", space)
        space.update(reader.read())
        given = dict(space)
        for seeded in (random.seed, torch.manual_seed, lambda one: np.random.seed(one % 2**32)):
            seeded(seed + outcome.rank)
        dist, ignore = torch.distributed, lambda original: lambda *_, **__: None
        # The next cell needs the process group, which scripts destroy at their end.
        with patched(dist, DESTROY, ignore), patched(dist.distributed_c10d, DESTROY, ignore):
            done = shell.run_cell(source, store_history=False)
        if error := done.error_before_exec or done.error_in_exec:
            outcome.error = f"{type(error).__name__}: {error}"
        else:
            _meet(folder, outcome)  # before `restore_all`, which may enter collectives
            restore_all()
            changed = (n for n in space if n[:1] != "_" and space[n] is not given.get(n, space))
            names = {*changed, *bound} & space.keys() - OWN
            made = {n: space[n] for n in names if not isinstance(space[n], SpeedContext)}
            outcome.values = {n: repr(v) for n, v in made.items() if isinstance(v, VALUES)}
            if outcome.rank == 0:
                outcome.stays = reply(folder / "reply", made, reader.memo.copy(), space)
    except BaseException as error:  # Ctrl-C, `_meet`, or an object that can't be read or sent
        outcome.error = in_a_line(error)
        outcome.lines.append(outcome.error)
    finally:
        ended.set()
        shell._showtraceback = shown
        for model in filter(is_sharded, planned_models()):
            abandon(model)
        restore_all()
        for name in space.keys() - before.keys():
            del space[name]
        space.update(before)
    return outcome


def _note_place(folder: Path, rank: int, thread: int, ended: threading.Event) -> None:
    """Write the CPU seconds, collectives and stack of a cell to a file whenever they change."""
    before = ""
    while not ended.wait(ALONE_S / 10):
        stack = "".join(traceback.format_stack(sys._current_frames()[thread]))
        # The cell's frames follow exec(…, self.user_ns). Waiting ranks use CPU time with CUDA only.
        used_s = 0 if torch.cuda.is_available() else round(time.process_time())
        text = f"{used_s} {torch_private.collectives()}\n{stack.split(', self.user_ns)')[-1]}"
        if text != before:
            (folder / f"place.{rank}").write_text(text)
        before = text


def _meet(folder: Path, outcome: Outcome) -> None:
    """Wait for all ranks to end. If one waits for this rank, note its stack; raise RuntimeError."""
    entered = torch_private.collectives()
    (folder / f"ended.{outcome.rank}").touch()
    while len([*folder.glob("ended.*")]) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.02)
        for file in folder.glob("place.*"):
            counts, _, place = file.read_text().partition("\n")
            is_at_rest = time.time() - file.stat().st_mtime > ALONE_S
            runs = not (folder / f"ended{file.suffix}").exists()
            if is_at_rest and runs and int(counts.split()[1]) > entered:
                outcome.rank, outcome.lines = int(file.suffix[1:]), [place]
                raise RuntimeError("it waits in a collective that another rank has not entered")

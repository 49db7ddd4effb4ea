"""A plan as a script for torchrun with checkpoints, and the batch file that starts it on Slurm."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from inspect import getsource
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.catalog import named as catalog_entry
from speedkit_jupyter.catalog.properties.sharding import RankBatches
from speedkit_jupyter.codegen.script import (
    MODEL,
    SHARDED,
    Script,
    assembled,
    comment,
    function,
    making,
)
from speedkit_jupyter.codegen.training_loop import BATCH, Block, indented
from speedkit_jupyter.plans.planning import Plan
from speedkit_jupyter.support.exceptions import SpeedKitError

if TYPE_CHECKING:
    from speedkit_jupyter.catalog.base.decision import Decision

FILE = "train.py"
PORT = 29500  # torchrun's default
NODES, RESTARTS = 2, 3  # examples, for the user to edit
IMPORTS = (
    "import shutil",
    "import sys",
    "import time",
    "import torch",
    "import torch.distributed as dist",
    "from collections.abc import Iterator",
    "from dataclasses import dataclass",
    "from itertools import pairwise",
    "from pathlib import Path",
    "from typing import Any",
    "from torch.utils.data import DataLoader, RandomSampler, Sampler",
)
LOADER = """\
rank, ranks = dist.get_rank(), dist.get_world_size()
shuffles = isinstance(loader.sampler, RandomSampler)
size = loader.batch_size * ranks
batches = RankBatches(len(loader.dataset), size, loader.drop_last, shuffles, rank, ranks, 0)
loader = DataLoader(
    loader.dataset,
    batch_sampler=batches,
    num_workers=loader.num_workers,
    collate_fn=loader.collate_fn,
    pin_memory=loader.pin_memory,
)"""
# A lost rank is a RuntimeError of gloo's, a DistError of NCCL's.
MAIN = """\
if __name__ == "__main__":
    try:
        train({arguments})
    except (dist.DistError, RuntimeError) as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        reason = str(error).partition("\\n")[0]
        sys.exit(f"rank {{dist.get_rank()}} ends, because another can't be reached: {{reason}}")
    dist.barrier()
    time.sleep(1)  # gloo's threads let go of their last tensors before Python ends
    dist.destroy_process_group()"""
SLURM = """\
#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{gpus}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node {each} --max-restarts {restarts} \\
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$head:{port}" {file}
"""


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoints of `torch.distributed.checkpoint` in a folder; all ranks call both methods."""

    folder: str

    def save(self, step: int, module: Any, *optimizers: Any) -> None:
        """Write the state after `step` steps, and then delete earlier states."""
        from torch.distributed.checkpoint.state_dict_saver import save

        save(self._states(module, optimizers), checkpoint_id=self._at(step))
        for old in self._saved() - {step}:
            shutil.rmtree(self._at(old), ignore_errors=True)

    def load(self, module: Any, *optimizers: Any) -> int:
        """Load the last complete state into these; return its step, 0 if nothing is saved."""
        from torch.distributed.checkpoint.state_dict import set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        if last := max(self._saved(), default=0):
            found = self._states(module, optimizers)
            load(found, checkpoint_id=self._at(last))
            weights, moments = found["model"], found["optim"]
            given = {"model_state_dict": weights, "optim_state_dict": moments}
            set_state_dict(module, optimizers, **given)
        return last

    def _states(self, module: Any, optimizers: Any) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        return dict(zip(("model", "optim"), get_state_dict(module, optimizers), strict=True))

    def _at(self, step: int) -> Path:
        return Path(self.folder, str(step))

    def _saved(self) -> set[int]:
        """Return the steps of complete states: torch writes .metadata last."""
        return {int(one.parent.name) for one in Path(self.folder).glob("[0-9]*/.metadata")}


def spread(plan: Plan) -> Plan:
    """Return the plan for several processes. Raises SpeedKitError if `distributed` is off."""
    entry, kind = catalog_entry("distributed"), plan.facts_after.device_type
    processes = max(2, plan.facts.processes, _gpus(plan))
    facts = replace(plan.facts, processes=processes)
    spread = entry.decide(plan.config.request(entry.name), plan.hardware, facts)
    if not spread.active:
        raise SpeedKitError(f"`distributed` is off ({spread.why}): for one process take --as torch")

    def changed(decision: Decision) -> Decision:
        if decision.name == entry.name:
            return spread
        if decision.name in entry.excludes:
            return replace(decision, value=False, active=False)
        if decision.name == "device" and kind != "cpu":
            return replace(decision, value=kind, active=True, rule="each process has its own")
        return decision

    return replace(plan, decisions=tuple(map(changed, plan)), facts=facts)


def torchrun(script: Script) -> str:
    """Return a whole script with a place for the user's own lines."""
    if not script.optimizers:
        raise SpeedKitError("torchrun is for training, and there is no optimizer: take --as torch")
    optimizers = [replace(one, own=not one.makeable, word="") for one in script.optimizers]
    model = script.model if script.own_name else MODEL
    script = replace(script, model=model, optimizers=tuple(optimizers))
    if script.own and script.plan["distributed"].value in SHARDED:
        names = ", ".join(sorted(script.own))
        raise SpeedKitError(f"{names} can't be made anew for a sharded model: take --as torch")
    call, kind = script.call, script.plan.facts_after.device_type
    given = ["loader"] if call.own_loss else ["loader", "loss_fn"]
    words = ", ".join(f"`{word}`" for word in [script.model, *sorted(script.own), *given])
    start = f"torchrun --nproc-per-node {_each(script.plan)}"
    nodes = f"--nnodes {NODES} --max-restarts {RESTARTS} --rdzv-backend c10d"
    devices = ["torch.accelerator.set_device_index(dist.get_node_local_rank())"]
    blocks = [
        [
            f"# {start} {FILE}",
            f"# On each of {NODES} nodes, of which HOST is one:",
            f"# {start} {nodes} --rdzv-endpoint HOST:{PORT} {FILE}",
        ],
        *script.setup(),
        devices if kind != "cpu" else [],
        comment(f"Your own lines go here: those that make {words}."),
        *script.blocks("model"),
        making(script),
        *script.blocks("training"),
    ]
    arguments = ", ".join(given)
    main = MAIN.format(arguments=arguments).splitlines()
    parts = [("", "", *getsource(part).splitlines()) for part in (RankBatches, Checkpoint)]
    step = function(script, MODEL, "{loss}.backward()")
    after = [*chain(*parts), "", "", *_train(script, arguments), "", "", *main]
    return assembled(script, blocks, [*step, *after], *IMPORTS)


def _train(script: Script, arguments: str) -> Block:
    call, kept = script.call, ", ".join([MODEL, *script.names])
    inputs = {BATCH: "batch", "*inputs": "*inputs"}.get(call.inputs, "inputs")
    batch = "batch" if call.own_loss else f"{inputs}, {call.targets}"
    body = [
        *LOADER.splitlines(),
        'checkpoint = Checkpoint("checkpoints")  # on a disk that all nodes share',
        f"for epoch in range(checkpoint.load({kept}), epochs):",
        "    batches.epoch = epoch",
        f"    for {batch} in loader:",
        f"        loss = train_step({call.arguments})",
        "    if dist.get_rank() == 0:",
        '        print(f"epoch {epoch + 1}: loss {loss.item():.4g}", flush=True)',
        f"    checkpoint.save(epoch + 1, {kept})",
    ]
    return [f"def train({arguments}, epochs=1):", *indented(body)]


def slurm(plan: Plan) -> str:
    """Return a batch file for `sbatch`."""
    gpus = _gpus(plan)
    line = f"#SBATCH --gpus-per-node={gpus}\n" if gpus else ""
    return SLURM.format(
        nodes=NODES, gpus=line, each=_each(plan), port=PORT, file=FILE, restarts=RESTARTS
    )


def _gpus(plan: Plan) -> int:
    kind = plan.facts_after.device_type
    return sum(one.kind == kind for one in plan.hardware.accelerators)


def _each(plan: Plan) -> int:
    """Return the processes of a node: one for each GPU, or the present number."""
    return _gpus(plan) or max(2, plan.facts.processes // plan.facts.hosts)

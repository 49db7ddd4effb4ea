"""A plan as a script for torchrun, and the files by which Slurm and Kubernetes start it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from inspect import getsource
from itertools import chain
from typing import TYPE_CHECKING

from speedkit_jupyter.catalog import named as catalog_entry
from speedkit_jupyter.catalog.properties.data import RankBatches
from speedkit_jupyter.codegen.checkpoint import Checkpoint
from speedkit_jupyter.codegen.script import (
    MODEL,
    SHARDED,
    Script,
    assembled,
    comment,
    function,
    makeable,
    making,
)
from speedkit_jupyter.codegen.training_loop import BATCH, Block, indented
from speedkit_jupyter.plans.planning import Plan
from speedkit_jupyter.support.exceptions import SpeedKitError

if TYPE_CHECKING:
    from speedkit_jupyter.catalog.base.decision import Decision

FILE, PORT, NODES, RESTARTS = "train.py", 29500, 2, 3
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
# The operator sets the rendezvous in the environment, where torchrun reads it.
KUBERNETES = """\
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata:
  name: train
spec:
  elasticPolicy:
    {{minReplicas: {nodes}, maxReplicas: {nodes}, maxRestarts: {restarts}, rdzvBackend: c10d}}
  pytorchReplicaSpecs:
    Worker:
      replicas: {nodes}
      restartPolicy: OnFailure
      template:
        spec:
          containers:
            - name: pytorch
              image: IMAGE  # yours, with torch and {file}
              command: [torchrun, --nproc-per-node={each}, {file}]
{gpus}"""


def spread(plan: Plan) -> Plan:
    """Return the plan for several processes; raises SpeedKitError where `distributed` is off."""
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
    """Write a whole script; the user's own lines have their place in it."""
    if not script.optimizers:
        raise SpeedKitError("torchrun is for training, and there is no optimizer: take --as torch")
    own = frozenset(name for name in script.optimizers if not makeable(script, name))
    if own and script.plan["distributed"].value in SHARDED:
        names = ", ".join(sorted(own))
        raise SpeedKitError(f"{names} can't be made anew for a sharded model: take --as torch")
    script = replace(script, model=script.model if script.own_name else MODEL, own=own, words={})
    call, kind = script.call, script.plan.facts_after.device_type
    given = ["loader"] if call.own_loss else ["loader", "loss_fn"]
    words = ", ".join(f"`{word}`" for word in [script.model, *sorted(own), *given])
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
    call, kept = script.call, ", ".join([MODEL, *script.optimizers])
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


def kubernetes(plan: Plan) -> str:
    """Return a PyTorchJob of Kubeflow's training operator for `kubectl apply`."""
    gpus = _gpus(plan)
    line = f"              resources: {{limits: {{nvidia.com/gpu: {gpus}}}}}\n" if gpus else ""
    return KUBERNETES.format(nodes=NODES, gpus=line, each=_each(plan), file=FILE, restarts=RESTARTS)


STARTERS: dict[str, Callable[[Plan], str]] = {"slurm": slurm, "kubernetes": kubernetes}


def _gpus(plan: Plan) -> int:
    kind = plan.facts_after.device_type
    return sum(one.kind == kind for one in plan.hardware.accelerators)


def _each(plan: Plan) -> int:
    """Return the processes of a node: one for each GPU, or as many as there are now."""
    return _gpus(plan) or max(2, plan.facts.processes // plan.facts.hosts)

"""Write a plan as a script for several processes: `%speedkit code --as torchrun`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from speedkit_jupyter.catalog import named as catalog_entry
from speedkit_jupyter.catalog.base.decision import Decision
from speedkit_jupyter.codegen import script as scripts
from speedkit_jupyter.codegen.script import BATCH, MODEL, Script
from speedkit_jupyter.plans.planning import Plan
from speedkit_jupyter.support.exceptions import SpeedKitError

IMPORTS = (
    "import time",
    "import torch",
    "import torch.distributed as dist",
    "from torch.utils.data import DataLoader, DistributedSampler, RandomSampler",
)
TRAIN = """\


def train({arguments}, epochs=1):
    shuffle = isinstance(loader.sampler, RandomSampler)
    sampler = DistributedSampler(loader.dataset, shuffle=shuffle, drop_last=loader.drop_last)
    loader = DataLoader(
        loader.dataset, loader.batch_size, sampler=sampler, num_workers=loader.num_workers,
        collate_fn=loader.collate_fn, pin_memory=loader.pin_memory, drop_last=loader.drop_last,
    )
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for {batch} in loader:
            loss = train_step({given})
        if dist.get_rank() == 0:
            print(f"epoch {{epoch + 1}}: loss {{loss.item():.4g}}", flush=True)


if __name__ == "__main__":
    train({arguments})
    dist.barrier()
    time.sleep(1)  # gloo's threads let go of their last tensors before Python ends
    dist.destroy_process_group()"""


def write(plan: Plan, *given: Any) -> str:
    """Return a plan's script for torchrun. Raises SpeedKitError if none can be written."""
    return _whole(scripts.gather(_for_processes(plan), "torch", *given))


def _for_processes(plan: Plan) -> Plan:
    entry, kind = catalog_entry("distributed"), plan.facts_after.device_type
    facts = replace(plan.facts, processes=max(2, plan.facts.processes, _gpus(plan)))
    spread = entry.decide(plan.config.request(entry.name), plan.hardware, facts)
    if not spread.active:
        raise SpeedKitError(f"`distributed` is off ({spread.why}): for one process use --as torch")

    def changed(decision: Decision) -> Decision:
        if decision.name == entry.name:
            return spread
        if decision.name in entry.excludes:
            return replace(decision, value=False, active=False)
        if decision.name == "device" and kind != "cpu":
            return replace(decision, value=kind, active=True, rule="each process has its own")
        return decision

    return replace(plan, decisions=tuple(map(changed, plan)), facts=facts)


def _whole(script: Script) -> str:
    if not script.optimizers:
        raise SpeedKitError("torchrun is for training, and there is no optimizer: use --as torch")
    optimizers = [replace(one, own=not one.makeable, word="") for one in script.optimizers]
    script = replace(script, model=MODEL, optimizers=tuple(optimizers))
    if script.own and any(snippet.replaces_parameters for snippet in script.snippets):
        names = ", ".join(sorted(script.own))
        raise SpeedKitError(f"{names} can't be recreated for a sharded model: use --as torch")
    call, plan = script.call, script.plan
    given = ["loader"] if call.own_loss else ["loader", "loss_fn"]
    words = ", ".join(f"`{word}`" for word in [MODEL, *sorted(script.own), *given])
    each = _gpus(plan) or max(2, plan.facts.processes // plan.facts.hosts)
    start = f"torchrun --nproc-per-node {each}"
    nodes = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500"
    device = "torch.accelerator.set_device_index(dist.get_node_local_rank())"
    blocks = [
        [f"# {start} train.py", f"# On each of 2 nodes: {start} {nodes} train.py"],
        *script.setup(),
        [device] if plan.facts_after.device_type != "cpu" else [],
        scripts.comment(f"Put your own lines here, which create {words}."),
        *script.blocks("model"),
        scripts.making(script),
        script.lowered(MODEL),
        *script.blocks("training"),
    ]
    inputs = "batch" if call.inputs == BATCH else call.inputs
    batch = "batch" if call.own_loss else f"{inputs}, targets"
    train = TRAIN.format(arguments=", ".join(given), batch=batch, given=call.arguments)
    step = scripts.function(script, MODEL)
    return scripts.assembled(script, blocks, [*step, *train.splitlines()], *IMPORTS)


def _gpus(plan: Plan) -> int:
    kind = plan.facts_after.device_type
    return sum(one.kind == kind for one in plan.hardware.accelerators)

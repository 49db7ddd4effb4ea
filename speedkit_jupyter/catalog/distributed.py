"""The model over several processes: a copy in each, or a part of it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from pydantic import Field

from speedkit_jupyter.catalog.base.decision import (
    Decision,
    Effect,
    Form,
    Request,
    Snippet,
    Switch,
    call,
)
from speedkit_jupyter.catalog.base.optimization import Fields, Flag, Optimization
from speedkit_jupyter.catalog.base.target import Target
from speedkit_jupyter.catalog.facts.model import Facts, processes_of, repeated_blocks
from speedkit_jupyter.catalog.properties.calls import CALLS, Call, around, chain
from speedkit_jupyter.catalog.properties.sharding import Sharded, is_sharded, unsynced
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.support.units import count, size
from speedkit_jupyter.torchglue import private as torch_private

# Weights, gradients and Adam's two moments in float32.
BYTES_PER_PARAMETER = 16
BYTES_PER_WEIGHT = 4
# Of a device's memory; the rest is for activations.
SHARE_OF_MEMORY = 0.5
ONE = "one process: %%speedkit launch or torchrun starts more"


class Distributed(Optimization):
    """Copies (`ddp`), parts (`fsdp2`), or parts within a host and copies across (`hybrid`).

    Every rank has to apply and restore it.
    """

    name = "distributed"
    effect = Effect.ROUNDING
    excludes = frozenset({"cuda_graphs"})
    summary = "each process trains on its own samples, and gradients are averaged over all"
    helps = "machines with several GPUs, and models that are too large for one"
    risk = (
        "the batch of a step is that of all processes together; communication may cost more than "
        "the processes gain; all ranks have to apply and restore it"
    )
    undone = "full, plain parameters, gradients and optimizer state in the same objects"
    page = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"

    class Options(Fields):
        """`static_graph` and `bucket_view` are for `ddp`. `reshard` frees gathered weights after
        the forward pass; `prefetch` gathers those of so many blocks ahead.
        """

        strategy: Literal["auto", False, "ddp", "fsdp2", "hybrid"] = "auto"
        reduce: Literal["auto", "bf16"] = "auto"
        reshard: Switch = "auto"
        prefetch: int = Field(0, ge=0, strict=True, description="0: as torch does; 1, 2, 3 …")
        bucket_view: Flag = True
        static_graph: Flag = False

    def changes(self) -> dict[str, Any]:
        return {f"{self.name}:{word}": word for word in ("ddp", "fsdp2", "hybrid")}

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        asked, options = request.word, request.value
        if asked is False:
            return request.leave(False, asked=True)
        if facts.processes < 2:
            return request.decline(False, ONE)
        if obstacle := _obstacle(facts, asked):
            return request.decline(False, obstacle)
        if asked == "hybrid" and facts.hosts < 2:
            return request.decline(False, "hybrid is for several hosts; this is one: fsdp2")
        names = ("reduce", "prefetch", "bucket_view", "static_graph")
        details = {name: getattr(options, name) for name in names}
        hint = f"{facts.processes} times the samples a step; loader = ctx.sharded(loader)"
        value, rule = _by_memory(hardware, facts)
        if asked != "auto":
            value, rule = asked, f"over {count(facts.processes, 'rank')}"
        details["reshard"], links = _by_links(options, value, hardware, facts)
        if value == "ddp" and details["reduce"] == "bf16" and facts.device_type == "cpu":
            details["reduce"] = "auto"
            hint += "; gradients go in full precision: ddp sends bf16 between GPUs only"
        decide = request.apply if asked == "auto" else request.obey
        return decide(value, f"{rule}; {links}", details=details, hint=hint)

    @contextmanager
    def applied(self, decision: Decision, target: Target) -> Iterator[None]:
        import torch.distributed as dist

        if not (decision.value and dist.is_available() and dist.is_initialized()):
            yield
            return
        if decision.value == "ddp":
            copies = ReplicatedCalls(target.model, decision.details, target.only_in)
            with CALLS.overriding([(target.model, copies)]):
                try:
                    yield
                finally:
                    copies.end()
            return
        blocks = [*repeated_blocks(target.model), target.model]
        sharded = Sharded(blocks, target.live_optimizers, **_sharding(decision, target.model))
        del blocks
        with sharded as calls, CALLS.overriding(calls):
            del calls  # what is named here would live as long as the plan
            yield

    def observe(self, target: Target, planned: Decision | None = None) -> Mapping[str, Any]:
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
            return {}
        now = (
            "ddp" if around(target.model, ReplicatedCalls) else is_sharded(target.model) and "parts"
        )
        if planned:
            now = "parts" if planned.value in ("fsdp2", "hybrid") else planned.value
        return {"model.distributed": now or "no"}

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        if form != "torch":  # its launcher and its own arguments do it
            return Snippet(comment=f"start it with {form}'s own launcher")
        imports, lines = (_ddp if decision.value == "ddp" else _parts)(decision, facts)
        return Snippet(
            decision.why,
            imports=("import torch.distributed as dist", *imports),
            setup=("dist.init_process_group()  # under torchrun",),
            model=tuple(lines),
        )


def _ddp(decision: Decision, facts: Facts) -> tuple[list[str], list[str]]:
    """Return imports and lines that make the model a copy on each rank."""
    more = {"gradient_as_bucket_view": decision.details.get("bucket_view", True)}
    if decision.details.get("static_graph"):
        more["static_graph"] = True
    imports = ["from torch.nn.parallel import DistributedDataParallel"]
    lines = [f"model = {call('DistributedDataParallel', 'model', **more)}"]
    if decision.details.get("reduce") == "bf16":
        hooks = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
        imports.append(f"from {hooks} import bf16_compress_hook")
        lines.append("model.register_comm_hook(None, bf16_compress_hook)")
    return imports, lines


def _parts(decision: Decision, facts: Facts) -> tuple[list[str], list[str]]:
    """Return imports and lines that leave a part of the model on each rank."""
    words = [f"reshard_after_forward={decision.details.get('reshard', True)}"]
    imports = ["from torch.distributed.fsdp import fully_shard"]
    lines = [
        "for tensor in [*model.parameters(), *model.buffers()]:  # rank 0's, on all",
        "    dist.broadcast(tensor.detach(), 0)",
    ]
    if decision.details.get("reduce") == "bf16":
        imports[0] = "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard"
        lines.append("policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)")
        words.append("mp_policy=policy")
    if decision.value == "hybrid":
        imports += ["import os", "from torch.distributed.device_mesh import init_device_mesh"]
        shape = "(dist.get_world_size() // local, local)"
        lines += [
            'local = int(os.environ["LOCAL_WORLD_SIZE"])',
            f'mesh = init_device_mesh("{facts.device_type}", {shape})',
        ]
        words.append("mesh=mesh")
    kinds = " ".join(f'"{name}",' for name in facts.block_classes)
    if kinds:
        lines += [
            f"kinds = ({kinds})",
            "blocks = [*model.modules()][1:]",
            "blocks = [block for block in blocks if type(block).__name__ in kinds]",
            "for block in blocks:",
            f"    fully_shard(block, {', '.join(words)})",
        ]
    lines.append(f"fully_shard(model, {', '.join(words)})")
    if kinds and (number := decision.details.get("prefetch")):
        lines += [
            f"model.set_modules_to_forward_prefetch(blocks[:{number}])",
            "for index, block in enumerate(blocks):",
            f"    block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + {number}])",
            f"    earlier = blocks[max(0, index - {number}) : index]",
            "    block.set_modules_to_backward_prefetch(earlier[::-1])",
        ]
    return imports, lines


def _obstacle(facts: Facts, asked: str) -> str:
    if facts.launcher == "Accelerate" and asked == "auto":
        return "Accelerate spreads the model by prepare(); `distributed: ddp` does it without"
    if facts.launcher not in ("", "Accelerate"):
        return f"{facts.launcher} spreads the model over the processes already"
    if facts.lazy:
        return "parameters have no shape yet: call the model once"
    if facts.compiled != "no":
        return "the model is compiled: apply it to the plain model"
    if len(facts.devices) > 1:
        return f"the model lies on {', '.join(facts.devices)}"
    return "" if facts.parameters else "the model has no parameters"


def _memory(hardware: Hardware, facts: Facts) -> int:
    """Return a rank's bytes: its GPU's, or its part of the host's."""
    gpu = hardware.accelerator(facts.device)
    return gpu.memory_bytes if gpu else hardware.cpu.memory_bytes * facts.hosts // facts.processes


def _by_memory(hardware: Hardware, facts: Facts) -> tuple[str, str]:
    """Return copies where they fit, else parts, with the numbers that decide."""
    memory, on_host = _memory(hardware, facts), max(1, facts.processes // facts.hosts)
    needs, room = facts.parameters * BYTES_PER_PARAMETER, int(memory * SHARE_OF_MEMORY)
    if not room or needs <= room:
        return "ddp", f"training state of {size(needs)} fits into each rank ({size(room)})"
    too_large = f"training state of {size(needs)} is more than half of a rank's {size(memory)}"
    if facts.hosts > 1 and needs <= room * on_host:
        return "hybrid", f"{too_large}; one host holds it: parts within a host, copies across"
    return "fsdp2", f"{too_large}: each of {facts.processes} holds a part"


def _by_links(
    options: Distributed.Options, strategy: str, hardware: Hardware, facts: Facts
) -> tuple[bool, str]:
    """Return whether gathered weights are freed after the forward pass, and what the links say.

    Kept, they are gathered once a step: two thirds of the bytes are sent.
    """
    reshard, links = options.reshard is not False, hardware.links
    if facts.device_type == "cpu":
        return reshard, "gloo connects CPUs: there are no links to choose by"
    if not links or facts.hosts > 1:
        return reshard, f"{links or 'unknown links'} between GPUs of a host"
    if links == "NVLink" or strategy == "ddp":
        slow = "" if links == "NVLink" else ": `reduce: bf16` halves what is sent"
        return reshard, f"{links} between the GPUs{slow}"
    whole = facts.parameters * BYTES_PER_WEIGHT
    held = facts.parameters * BYTES_PER_PARAMETER // facts.processes
    fits = held + whole <= _memory(hardware, facts) * SHARE_OF_MEMORY
    if options.reshard != "auto" or not fits:
        return reshard, "PCIe between the GPUs"
    return False, f"PCIe between the GPUs, and weights of {size(whole)} fit: gathered once a step"


def _sharding(decision: Decision, model: torch.nn.Module) -> dict[str, Any]:
    """Return the arguments of `fully_shard`."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    details = decision.details
    kind = next(model.parameters()).device.type
    ranks, hosts = dist.get_world_size(), processes_of([model])["hosts"]
    shape = (hosts, ranks // hosts) if decision.value == "hybrid" else (ranks,)
    names = ("replicate", "shard")[-len(shape) :]
    reduced = torch.bfloat16 if details.get("reduce") == "bf16" else None
    return {
        "prefetch": details.get("prefetch", 0),
        "mesh": init_device_mesh(kind, shape, mesh_dim_names=names),
        "reshard_after_forward": details.get("reshard", True),
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=reduced),
    }


class ReplicatedCalls(Call):
    """The calls of a model that is the same on every rank: `DistributedDataParallel` around the
    calls below averages the gradients. The model stays what the user calls. Gradients of another
    method, or of a second backward pass, are averaged at the end of that pass.
    """

    def __init__(
        self, module: torch.nn.Module, details: Mapping[str, Any], only_in: int | None
    ) -> None:
        from torch.nn.parallel import DistributedDataParallel

        super().__init__(module, None, only_in)
        outer = weakref.ref(self)

        class Below(torch.nn.Module):
            """The model as its own layer below: DDP calls this one."""

            def forward(self, *args: Any, **kwargs: Any) -> Any:
                layer = outer()
                assert layer is not None
                return layer.below(*args, **kwargs)

        shim = Below()
        shim.model = module
        if not any(parameter.requires_grad for parameter in module.parameters()):
            self._wrapped = None
            return
        self._wrapped = DistributedDataParallel(
            shim,
            gradient_as_bucket_view=details.get("bucket_view", True),
            static_graph=details.get("static_graph", False),
        )
        # Whether DistributedDataParallel averages in the next backward pass; whether one runs.
        self._averages = self._runs = False
        with torch.enable_grad():
            views = [one.view_as(one) for one in module.parameters() if one.requires_grad]
        # The nodes that accumulate, which DistributedDataParallel keeps: no hook of the user's.
        nodes: list[Any] = [view.grad_fn.next_functions[0][0] for view in views if view.grad_fn]
        self._hooks = [node.register_hook(self._accumulated) for node in nodes]
        if details.get("reduce") == "bf16":
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

            self._wrapped.register_comm_hook(None, bf16_compress_hook)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Evaluation may run on one rank alone: it exchanges nothing.
        if self._wrapped is None or not torch.is_grad_enabled() or not self.acts():
            return self.below(*args, **kwargs)
        self._averages = bool(self._wrapped.require_backward_grad_sync)
        return self._wrapped(*args, **kwargs)

    def _accumulated(self, *gradients: Any) -> None:
        if not self._runs:
            self._runs = True
            torch_private.after_backward(self._average)

    def _average(self) -> None:
        """Average what DistributedDataParallel does not, also what some ranks have no gradient of.

        What was averaged before stays as it is.
        """
        import torch.distributed as dist

        done, self._averages, self._runs = self._averages, False, False
        if done or self._wrapped is None or not self._wrapped.require_backward_grad_sync:
            return
        trained = [one for one in self.module.parameters() if one.requires_grad]
        some = torch.tensor([one.grad is not None for one in trained], dtype=torch.float32)
        dist.all_reduce(some := some.to(trained[0].device))
        for parameter, is_somewhere in zip(trained, some.tolist(), strict=True):
            if is_somewhere:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext() if self._wrapped is None else self._wrapped.no_sync()

    def end(self) -> None:
        """Give the gradients memory of their own, and let go of what averages them."""
        for hook in self._hooks if self._wrapped else ():
            hook.remove()
        self._wrapped = None
        for parameter in () if self.module is None else self.module.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.detach().clone()


def no_sync(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Return a block whose backward passes exchange no gradients; the next one sums all."""
    copies = next((call for call in chain(model) if isinstance(call, ReplicatedCalls)), None)
    own = getattr(copies or model, "no_sync", None)  # DistributedDataParallel's, too
    return unsynced(model) if own is None else own()


def exchanges(model: torch.nn.Module) -> bool:
    """Return whether a backward pass averages gradients over the ranks."""
    from torch.nn.parallel import DistributedDataParallel

    is_copy = isinstance(model, DistributedDataParallel) or around(model, ReplicatedCalls)
    return is_copy or is_sharded(model)

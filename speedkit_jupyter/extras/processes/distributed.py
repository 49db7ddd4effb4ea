"""The optimization `distributed`: train on several processes with `ddp` or `fsdp2`."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from typing import Any, Literal

import torch

from speedkit_jupyter.catalog.base.decision import Decision, Effect, Form, Request, Snippet
from speedkit_jupyter.catalog.base.optimization import Fields, Optimization
from speedkit_jupyter.catalog.base.target import Target
from speedkit_jupyter.catalog.facts.model import Facts, repeated_blocks
from speedkit_jupyter.catalog.model_changes.calls import CALLS, Call, around, chain
from speedkit_jupyter.extras.processes.sharding import Sharded, is_sharded
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.support.units import count, share, size
from speedkit_jupyter.torchglue import private as torch_private

# Bytes per parameter: weights, gradients and Adam's two moments in float32.
BYTES_PER_PARAMETER = 16
# Share of a rank's memory for training state; the rest is for activations.
SHARE_OF_MEMORY = 0.5


class Distributed(Optimization):
    """Train copies or shards of a model (ddp, fsdp2). All ranks must apply and restore the plan."""

    name = "distributed"
    effect = Effect.ROUNDING
    excludes = frozenset({"cuda_graphs"})
    before = "inference"
    forms = {"torchrun": f"{__package__}.torchrun"}
    summary = "each process trains on its own samples, and gradients are averaged over all"
    helps = "machines with several GPUs, and models that are too large for one"
    risk = (
        "a step takes the batches of all processes; communication may cost more than the processes "
        "gain; all ranks must apply and restore the plan"
    )
    page = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"

    class Options(Fields):
        strategy: Literal["auto", False, "ddp", "fsdp2"] = "auto"
        reduce: Literal["auto", "bf16"] = "auto"

    def changes(self) -> dict[str, Any]:
        return {f"{self.name}:{word}": word for word in ("ddp", "fsdp2")}

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        asked, options = request.word, request.value
        if asked is False:
            return request.leave(False, asked=True)
        if facts.processes < 2:
            return request.decline(False, "one process: %%speedkit launch or torchrun starts more")
        if obstacle := _obstacle(facts, asked):
            return request.decline(False, obstacle)
        details = {"reduce": options.reduce}
        hint = f"{facts.processes} times the samples a step, by a DistributedSampler"
        value, rule = asked, f"over {count(facts.processes, 'rank')}"
        if asked == "auto":
            value, rule = _by_memory(hardware, facts)
        if value == "ddp" and options.reduce == "bf16" and facts.device_type == "cpu":
            details["reduce"] = "auto"
            hint += "; gradients go in full precision: ddp sends bf16 between GPUs only"
        elif value == "ddp" and options.reduce == "auto" and facts.device_type == "cuda":
            hint += "; over PCIe, `reduce: bf16` halves the gradients' bytes"
        decide = request.apply if asked == "auto" else request.obey
        return decide(value, rule, details=details, hint=hint)

    @contextmanager
    def applied(self, decision: Decision, target: Target) -> Iterator[None]:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy

        reduce = decision.details.get("reduce", "auto")
        if not dist.is_initialized():
            yield
            return
        if decision.value == "ddp":
            copies = ReplicatedCalls(target.model, reduce, target.only_in)
            with CALLS.overriding([(target.model, copies)]), closing(copies):
                yield
            return
        kind = next(iter(target.model.parameters())).device.type
        dtype = torch.bfloat16 if reduce == "bf16" else None
        sharded = Sharded(
            [*repeated_blocks(target.model), target.model],
            target.live_optimizers,
            mesh=init_device_mesh(kind, (dist.get_world_size(),)),
            mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype),
            reshard_after_forward=True,  # also for the root module: a restore reads shards
        )
        with sharded as calls, CALLS.overriding(calls):
            del calls  # a local name would keep the modules alive as long as the plan
            yield

    def observe(self, target: Target, planned: Decision | None = None) -> Mapping[str, Any]:
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            return {}
        now = "fsdp2" if is_sharded(target.model) else "no"
        now = "ddp" if around(target.model, ReplicatedCalls) else now
        return {"model.distributed": planned.value or "no" if planned else now}

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        if form != "torch":  # the framework's launcher distributes the model
            return Snippet(comment=f"start it with {form}'s own launcher")
        is_copy = decision.value == "ddp"
        imports, lines = _ddp(decision) if is_copy else _parts(decision, facts)
        return Snippet(
            decision.why,
            imports=("import torch.distributed as dist", *imports),
            setup=("dist.init_process_group()  # under torchrun",),
            model=tuple(lines),
            replaces_parameters=not is_copy,
        )

    @contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        """Accumulate gradients on each rank in the block; a later backward pass averages them."""
        copies = next((call for call in chain(model) if isinstance(call, ReplicatedCalls)), None)
        own = getattr(copies or model, "no_sync", nullcontext)  # or a user's DDP model
        synchronize = getattr(model, "set_requires_gradient_sync", lambda _: None)  # FSDP2 only
        synchronize(False)
        try:
            with own():
                yield
        finally:
            synchronize(True)


def _ddp(decision: Decision) -> tuple[list[str], list[str]]:
    imports = ["from torch.nn.parallel import DistributedDataParallel"]
    lines = ["model = DistributedDataParallel(model, gradient_as_bucket_view=True)"]
    if decision.details["reduce"] == "bf16":
        hooks = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
        imports.append(f"from {hooks} import bf16_compress_hook")
        lines.append("model.register_comm_hook(None, bf16_compress_hook)")
    return imports, lines


def _parts(decision: Decision, facts: Facts) -> tuple[list[str], list[str]]:
    words = ", reshard_after_forward=True"
    imports = ["from torch.distributed.fsdp import fully_shard"]
    lines = [
        "for tensor in [*model.parameters(), *model.buffers()]:  # rank 0's, on all",
        "    dist.broadcast(tensor.detach(), 0)",
    ]
    if decision.details["reduce"] == "bf16":
        imports[0] = "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard"
        lines.append("policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)")
        words += ", mp_policy=policy"
    if facts.block_classes:
        kinds = " ".join(f'"{name}",' for name in facts.block_classes)
        lines += [
            "for block in [*model.modules()][1:]:",
            f"    if type(block).__name__ in ({kinds}):",
            f"        fully_shard(block{words})",
        ]
    return imports, [*lines, f"fully_shard(model{words})"]


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
        return f"the model is on {', '.join(facts.devices)}"
    return "" if facts.parameters else "the model has no parameters"


def _by_memory(hardware: Hardware, facts: Facts) -> tuple[str, str]:
    """Return a strategy and its reason: `ddp` if a copy fits or memory is unknown, else `fsdp2`."""
    gpu, on_host = hardware.accelerator(facts.device), max(1, facts.processes // facts.hosts)
    memory = gpu.memory_bytes if gpu else hardware.cpu.memory_bytes // on_host  # memory of one rank
    needs, room = facts.parameters * BYTES_PER_PARAMETER, int(memory * SHARE_OF_MEMORY)
    if not room or needs <= room:
        return "ddp", f"training state of {size(needs)} fits into each rank ({size(room)})"
    allowed = f"{share(SHARE_OF_MEMORY)} of a rank's {size(memory)}"
    too_large = f"training state of {size(needs)} is more than {allowed}"
    return "fsdp2", f"{too_large}: each of {facts.processes} holds a part"


class InnerModel(torch.nn.Module):
    """The module that `DistributedDataParallel` wraps; it calls the model without the wrapper."""

    def __init__(self, calls: ReplicatedCalls) -> None:
        super().__init__()
        self.model, self._calls = calls.module, weakref.ref(calls)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        calls = self._calls()
        assert calls is not None
        return calls.below(*args, **kwargs)


class ReplicatedCalls(Call):
    """A wrapper that calls a model through `DistributedDataParallel`, which averages gradients.

    The wrapper also averages gradients of second backward passes and of calls to other methods.
    """

    def __init__(self, module: torch.nn.Module, reduce: str, only_in: int | None) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
        from torch.nn.parallel import DistributedDataParallel

        super().__init__(module, None, only_in)
        self._wrapped: DistributedDataParallel | None = None
        # Whether DDP averages gradients in the next backward pass; whether a backward pass runs.
        self._averages = self._runs = False
        trained = [one for one in module.parameters() if one.requires_grad]
        if not trained:
            return
        self._wrapped = DistributedDataParallel(InnerModel(self), gradient_as_bucket_view=True)
        if reduce == "bf16":
            self._wrapped.register_comm_hook(None, bf16_compress_hook)
        with torch.enable_grad():
            views = [one.view_as(one) for one in trained]
        # DistributedDataParallel keeps these AccumulateGrad nodes alive, and so their hooks.
        nodes: list[Any] = [view.grad_fn.next_functions[0][0] for view in views if view.grad_fn]
        self._hooks = [node.register_hook(self._accumulated) for node in nodes]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Evaluation may run on one rank only, so it must not communicate.
        if self._wrapped is None or not torch.is_grad_enabled() or not self.acts():
            return self.below(*args, **kwargs)
        self._averages = bool(self._wrapped.require_backward_grad_sync)
        return self._wrapped(*args, **kwargs)

    def _accumulated(self, *gradients: Any) -> None:
        if not self._runs:
            self._runs = True
            torch_private.after_backward(self._average)

    def _average(self) -> None:
        """Average all gradients, unless DistributedDataParallel did or `no_sync` is active.

        A gradient that is missing on some ranks becomes zeros there first.
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

    def close(self) -> None:
        """Release the wrapper; clone the gradients, which are views of the wrapper's buckets."""
        for hook in self._hooks if self._wrapped else ():
            hook.remove()
        self._wrapped = None
        for parameter in () if self.module is None else self.module.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.detach().clone()


def exchanges(model: torch.nn.Module) -> bool:
    """Return whether a backward pass of the model averages gradients over the ranks."""
    from torch.nn.parallel import DistributedDataParallel

    is_copy = isinstance(model, DistributedDataParallel) or around(model, ReplicatedCalls)
    return is_copy or is_sharded(model)

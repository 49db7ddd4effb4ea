"""What a model and its optimizers are: read once, before anything is decided."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch.nn.parameter import is_lazy

from speedkit_jupyter.catalog.facts.layers import (
    attribute,
    is_channels_last,
    is_convolution,
    is_linear,
    repeated_blocks,
    shapes,
)
from speedkit_jupyter.catalog.facts.optimizers import OptimizerFacts, distinct, words
from speedkit_jupyter.catalog.properties.calls import users_own as compiled_by_the_user
from speedkit_jupyter.catalog.properties.tensors import weight_of
from speedkit_jupyter.support.wrappers import each_once, layers
from speedkit_jupyter.torchglue.modules import COMPILED_CHILD, module_table

# glibc hands tensors of this size back to the system as soon as they are freed.
LARGE_BYTES = 32 << 20
Compiled = Literal["no", "in place", "wrapper", "script"]
# Gradient checkpointing as Hugging Face models bring it along.
OwnCheckpointing = Literal["none", "off", "on"]
LIGHTNING = ("lightning.", "pytorch_lightning.")


@dataclass(frozen=True)
class Facts:
    """A model, its optimizers (those behind wrappers) and the process that they are in."""

    device: str = "cpu"  # where most parameters lie: "cpu", "cuda:0"
    devices: tuple[str, ...] = ("cpu",)
    dtypes: tuple[str, ...] = ("float32",)  # the parameters' own
    parameters: int = 0
    convolutions: int = 0
    convolution_dims: tuple[int, ...] = (4,)  # dimensions of their weights: 4, 5
    channels_last: int = 0
    linears: int = 0
    lstms: int = 0
    blocks: int = 0  # that the model repeats
    block_classes: tuple[str, ...] = ()
    block_kinds: int = 0  # blocks that differ in their parts
    block_parameters: int = 0  # of all blocks
    own_checkpointing: OwnCheckpointing = "none"
    training: bool = True  # some module is in training mode
    frozen: bool = False  # no parameter requires gradients
    lazy: bool = False  # some parameters have no shape yet
    compiled: Compiled = "no"
    # How many modules of each class.
    classes: Mapping[type[torch.nn.Module], int] = field(default_factory=dict)
    model_type: str = ""  # transformers' word for the model
    block_names: tuple[str, ...] = ()  # of the repeated blocks that are not compiled yet
    blocks_of_torch: bool = False  # their forward is torch's own
    optimizers: tuple[OptimizerFacts, ...] = ()
    optimizers_later: bool = False  # some may be made after planning
    precision: str = "fp32"  # filled in while planning, as the next three
    passed_by: str = ""  # an active entry that compiled code would skip
    recomputed: bool = False  # activations of the blocks are
    quantized: str = ""  # the entry whose quantized weights are multiplied
    # What a step gets anew from the system: gradients of LARGE_BYTES, until a step was measured.
    fresh_bytes: int = 0
    step_s: float = 0.0  # of a step, once one was measured
    processes: int = 1  # of torch.distributed's group
    hosts: int = 1  # that they run on
    launcher: str = ""  # a framework that wraps the model itself, or what wraps it already
    flags: Mapping[str, Any] = field(default_factory=dict)  # `flags.snapshot()`

    @property
    def device_type(self) -> str:
        """Return the device without its index: "cpu", "cuda", "mps", "xpu"."""
        return self.device.partition(":")[0]

    @property
    def convolves(self) -> bool:
        """Return whether it is mostly convolutions, which no engine of matrix products runs."""
        return self.convolutions > self.linears

    @property
    def no_float32(self) -> str:
        """Return the parameters' dtypes where none is float32; empty where one is."""
        return "" if not self.parameters or "float32" in self.dtypes else ", ".join(self.dtypes)

    def stepped_by(self, optimizers: Sequence[OptimizerFacts]) -> Facts:
        """Return the facts with such optimizers beside its own; alike ones count once."""
        union = tuple(dict.fromkeys((*self.optimizers, *optimizers)))
        return replace(self, optimizers=union) if optimizers else self

    def moved(self, device: str) -> Facts:
        """Return the facts on another device, for the decisions that follow a move."""
        optimizers = tuple(replace(optimizer, devices=(device,)) for optimizer in self.optimizers)
        return replace(self, device=device, devices=(device,), optimizers=optimizers)

    @classmethod
    def read(
        cls, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer] = ()
    ) -> Facts:
        """Read the facts. Nothing is run, moved or allocated on a device."""
        from speedkit_jupyter.machines import flags

        parameters, modules = list(model.parameters()), list(model.modules())
        tensors = [*parameters, *model.buffers()]
        shaped = [tensor for tensor in tensors if not is_lazy(tensor)]
        convolutions = [m for m in modules if is_convolution(m)]
        weights = {id(weight): weight for weight in map(weight_of, convolutions)}
        devices = Counter(tensor.device for tensor in tensors)
        layered = layers(model)
        inner, repeated = layered[-1], repeated_blocks(layered[-1])
        ids = {id(block) for block in repeated if not compiled_by_the_user(block)}
        blocks = {name: m for name, m in inner.named_modules() if ids and id(m) in ids}
        return cls(
            device=str(devices.most_common(1)[0][0]) if devices else "cpu",
            devices=words(devices) or ("cpu",),
            dtypes=words(p.dtype for p in parameters),
            parameters=sum(p.numel() for p in parameters if not is_lazy(p)),
            convolutions=len(convolutions),
            convolution_dims=tuple(sorted({weight.dim() for weight in weights.values()})) or (4,),
            channels_last=sum(map(is_channels_last, convolutions)),
            linears=sum(isinstance(m, torch.nn.Linear) and is_linear(m) for m in modules),
            lstms=sum(isinstance(m, torch.nn.LSTM) for m in modules),
            blocks=len(repeated),
            block_classes=distinct(type(block).__name__ for block in repeated),
            block_kinds=len(set(map(shapes, repeated))),
            block_parameters=sum(
                p.numel() for block in repeated for p in block.parameters() if not is_lazy(p)
            ),
            fresh_bytes=sum(
                p.nbytes
                for p in parameters
                if p.requires_grad and not is_lazy(p) and p.nbytes >= LARGE_BYTES
            ),
            own_checkpointing=_own_checkpointing(modules),
            training=any(getattr(module, "training", False) for module in modules),
            frozen=bool(parameters) and not any(p.requires_grad for p in parameters),
            lazy=len(shaped) < len(tensors),
            compiled=_compiled(layered),
            classes=Counter(map(type, modules)),
            model_type=_model_type(inner),
            block_names=tuple(blocks),
            blocks_of_torch=any(
                str(getattr(type(block).forward, "__module__", "")).startswith("torch.")
                for block in blocks.values()
            ),
            optimizers=tuple(
                OptimizerFacts.read(optimizer, [model]) for optimizer in each_once(optimizers)
            ),
            flags=flags.snapshot(),
            **processes_of(layered),
        )


def _compiled(layered: Sequence[torch.nn.Module]) -> Compiled:
    if any(isinstance(layer, torch.jit.ScriptModule) for layer in layered):
        return "script"
    if any(COMPILED_CHILD in module_table(layer) for layer in layered):
        return "wrapper"
    return "in place" if any(map(compiled_by_the_user, layered)) else "no"


def _model_type(model: torch.nn.Module) -> str:
    """Return transformers' own word for a model of theirs; empty for others."""
    if not any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__):
        return ""
    return str(getattr(attribute(model, "config"), "model_type", ""))


def _own_checkpointing(modules: Iterable[torch.nn.Module]) -> OwnCheckpointing:
    every = (attribute(module, "gradient_checkpointing") for module in modules)
    words = [word for word in every if isinstance(word, bool)]
    return "on" if True in words else "off" if False in words else "none"


def processes_of(layered: Sequence[torch.nn.Module]) -> dict[str, Any]:
    """Return the number of processes and hosts, and what wraps the model, as fields of the facts.

    Reads the group that exists: `%%speedkit launch`, torchrun or a framework has made it.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return {}
    processes = dist.get_world_size()
    word = os.environ.get("LOCAL_WORLD_SIZE", "")
    on_this = int(word) if word.isdecimal() and len(word) < 10 else processes
    hosts = max(1, processes // max(1, on_this))
    return {"processes": processes, "hosts": hosts, "launcher": _launcher(layered)}


def _launcher(layered: Sequence[torch.nn.Module]) -> str:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    wrappers = (DistributedDataParallel, FullyShardedDataParallel, FSDPModule)
    for layer in layered:
        if isinstance(layer, wrappers):
            return type(layer).__name__
        modules = [kind.__module__ for kind in type(layer).__mro__]
        if any(name.startswith(LIGHTNING) for name in modules):
            return "Lightning"
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    return "Accelerate" if getattr(state, "_shared_state", None) else ""

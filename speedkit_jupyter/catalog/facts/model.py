"""Facts about a model and its optimizers, read once before anything is decided."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear as Lending
from torch.nn.parameter import is_lazy

from speedkit_jupyter.catalog.properties.calls import is_compiled_by_user
from speedkit_jupyter.catalog.properties.tensors import settings_of_user, weight_of
from speedkit_jupyter.support.wrappers import each_once, layers
from speedkit_jupyter.torchglue.modules import COMPILED_CHILD, module_table, parameter_table

# glibc hands tensors of this size back to the system as soon as they are freed.
LARGE_BYTES = 32 << 20
Compiled = Literal["no", "in place", "wrapper", "script"]
OwnCheckpointing = Literal["none", "off", "on"]  # a Hugging Face model's gradient checkpointing
Group = list[torch.nn.Module]


def is_convolution(module: torch.nn.Module) -> bool:
    """Return whether this is a 2-D or 3-D convolution with a weight of known shape."""
    convolution: Any = torch.nn.Conv2d.__base__
    weight = parameter_table(module).get("weight") if isinstance(module, convolution) else None
    return weight is not None and not is_lazy(weight) and weight.dim() in (4, 5)


def is_linear(module: torch.nn.Module) -> bool:
    """Return whether this layer itself multiplies; torch's attention only reads a weight."""
    return isinstance(module, torch.nn.Linear) and not isinstance(module, Lending)


def has_lazy_parameters(holder: torch.nn.Module | torch.optim.Optimizer) -> bool:
    """Return whether some parameter has no shape before the first forward pass."""
    if isinstance(holder, torch.optim.Optimizer):
        return False
    return any(map(is_lazy, (*holder.parameters(), *holder.buffers())))


def channels_last_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a 4-D or 5-D tensor with its channels last, in elements."""
    layout = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    return torch.empty(tensor.shape, memory_format=layout, device="meta").stride()


def is_channels_last(convolution: torch.nn.Module) -> bool:
    """Return whether the weight's strides are channels-last; kernels choose by strides alone."""
    weight = weight_of(convolution)
    return weight.stride() == channels_last_stride(weight)


def attribute(module: torch.nn.Module, name: str) -> Any:
    """Return a module's attribute or None; `getattr` is slow for a missing one."""
    return vars(module).get(name, getattr(type(module), name, None))


def repeated_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the model's repeated blocks, in its order, without blocks inside blocks.

    Blocks consist of modules and are of one class; a list or sequence has two or more of them, two
    with parameters of equal names and shapes.
    """
    groups = [(module, *pair) for module in model.modules() for pair in _siblings(module)]
    kinds = {kind for _, kind, group in groups if _has_equals(group)}
    blocks, inside = set[int](), set[int]()
    for module, kind, group in groups:  # outer ones first
        if kind in kinds and id(module) not in inside:
            blocks |= set(map(id, group))
            inside |= {id(part) for block in group for part in block.modules()}
    return [module for module in model.modules() if id(module) in blocks]


def _siblings(module: torch.nn.Module) -> list[tuple[Any, Group]]:
    """Return the children of a list or sequence by kind, two or more of each."""
    found: dict[Any, Group] = {}
    if isinstance(module, torch.nn.ModuleList | torch.nn.Sequential | torch.nn.ModuleDict):
        for child in module.children():
            found.setdefault(_kind(child), []).append(child)
    return [(kind, group) for kind, group in found.items() if len(group) > 1]


def _has_equals(group: Group) -> bool:
    """Return whether two are equal in names and shapes; lists and single layers don't count."""
    is_list = isinstance(group[0], torch.nn.ModuleList | torch.nn.ModuleDict)
    if is_list or not any(True for _ in group[0].children()):
        return False
    found = Counter(map(shapes, group))
    return any(count > 1 and shape for shape, count in found.items())


def _kind(module: torch.nn.Module) -> Any:
    """Return the module's class, for a plain sequence with the classes of its parts."""
    if type(module) is not torch.nn.Sequential:
        return type(module)
    return (type(module), *map(_kind, module.children()))


def shapes(module: torch.nn.Module) -> tuple[Any, ...]:
    """Return names and shapes of parameters and buffers; None for a shape not yet known."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return tuple((name, None if is_lazy(t) else tuple(t.shape)) for name, t in tensors)


@dataclass(frozen=True)
class OptimizerFacts:
    """One optimizer with the user's own settings, without the settings of plans."""

    name: str = "AdamW"
    has_fused: bool = True
    fused: tuple[bool | None, ...] = (None,)  # the distinct values of its groups
    foreach: tuple[bool | None, ...] = (None,)
    differentiable: bool = False
    capturable: bool = False
    devices: tuple[str, ...] = ("cpu",)
    dtypes: tuple[str, ...] = ("float32",)
    sparse_gradients: bool = False

    @classmethod
    def read(
        cls, optimizer: torch.optim.Optimizer, models: Iterable[torch.nn.Module] = ()
    ) -> OptimizerFacts:
        """Read the facts of an optimizer of these models."""
        groups = optimizer.param_groups
        settings = [settings_of_user(optimizer, group) for group in groups]
        parameters = [p for group in groups for p in group["params"]]
        modules = [module for model in models for module in model.modules()]
        layers = [module for module in modules if attribute(module, "sparse") is True]
        sparse = {id(p) for layer in layers for p in layer.parameters(recurse=False)}
        gradients = [p.grad for p in parameters if p.is_leaf and p.grad is not None]
        own_step = type(optimizer).step.__module__.startswith("torch.optim")
        return cls(
            name=type(optimizer).__name__,
            has_fused=own_step and all("fused" in group for group in groups),
            fused=distinct(values.get("fused") for values in settings),
            foreach=distinct(values.get("foreach") for values in settings),
            differentiable=any(group.get("differentiable") for group in groups),
            capturable=any(group.get("capturable") for group in groups),
            devices=words(p.device for p in parameters),
            dtypes=words(p.dtype for p in parameters),
            sparse_gradients=any(id(p) in sparse for p in parameters)
            or any(gradient.layout is not torch.strided for gradient in gradients),
        )


def distinct(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return each value once, in order."""
    return tuple(dict.fromkeys(values))


def words(values: Iterable[torch.device | torch.dtype]) -> tuple[str, ...]:
    """Return `cuda:0` or `float32` for each value once."""
    return distinct(str(value).removeprefix("torch.") for value in values)


@dataclass(frozen=True)
class Facts:
    """The facts of a model, its optimizers and their process; wrappers are looked through.

    `Facts.read(model, optimizers)` reads them. The defaults describe a float32 model on a CPU.
    """

    device: str = "cpu"  # the device of most parameters: "cpu", "cuda:0"
    devices: tuple[str, ...] = ("cpu",)
    dtypes: tuple[str, ...] = ("float32",)  # the dtypes of the parameters
    parameters: int = 0
    convolutions: int = 0
    convolution_dims: tuple[int, ...] = (4,)  # dimensions of their weights: 4, 5
    channels_last: int = 0
    linears: int = 0
    lstms: int = 0
    blocks: int = 0  # repeated blocks, as the layers of a transformer
    block_classes: tuple[str, ...] = ()
    block_kinds: int = 0  # blocks that differ in their parts
    block_parameters: int = 0  # of all blocks
    own_checkpointing: OwnCheckpointing = "none"
    training: bool = True  # some module is in training mode
    frozen: bool = False  # no parameter requires gradients
    lazy: bool = False  # some parameters have no shape yet
    compiled: Compiled = "no"
    classes: Mapping[type[torch.nn.Module], int] = field(default_factory=dict)  # with their counts
    block_names: tuple[str, ...] = ()  # of the repeated blocks that are not compiled yet
    blocks_of_torch: bool = False  # their forward is torch's own
    optimizers: tuple[OptimizerFacts, ...] = ()
    optimizers_later: bool = False  # some may be made after planning
    precision: str = "fp32"  # set while planning, as are the next three
    graphed: bool = False  # calls of the model are recorded as CUDA graphs
    recomputed: bool = False  # the backward pass recomputes the blocks' activations
    quantized: str = ""  # the entry that replaces weights by quantized ones
    # Bytes that a step newly requests from the system. Estimated as the bytes of all gradients of
    # LARGE_BYTES or more, until a step is measured.
    fresh_bytes: int = 0
    step_s: float = 0.0  # measured seconds of a step; 0 before a measurement
    processes: int = 1  # in torch.distributed's group
    hosts: int = 1  # that run these processes
    launcher: str = ""  # a framework, or a class of torch, that distributes the model already
    flags: Mapping[str, Any] = field(default_factory=dict)  # `flags.snapshot()`

    @property
    def device_type(self) -> str:
        """Return the device without its index: "cpu", "cuda", "mps", "xpu"."""
        return self.device.partition(":")[0]

    @property
    def convolves(self) -> bool:
        """Return whether most layers are convolutions, which matrix-product engines don't run."""
        return self.convolutions > self.linears

    @property
    def no_float32(self) -> str:
        """Return the parameters' dtypes if none is float32; empty if one is."""
        return "" if not self.parameters or "float32" in self.dtypes else ", ".join(self.dtypes)

    def stepped_by(self, optimizers: Sequence[OptimizerFacts]) -> Facts:
        """Return the facts with these optimizers added; equal ones count once."""
        union = tuple(dict.fromkeys((*self.optimizers, *optimizers)))
        return replace(self, optimizers=union) if optimizers else self

    def moved(self, device: str) -> Facts:
        """Return the facts on another device, for the decisions that follow a move."""
        optimizers = tuple(replace(one, devices=(device,)) for one in self.optimizers)
        return replace(self, device=device, devices=(device,), optimizers=optimizers)

    @classmethod
    def read(
        cls, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer] = ()
    ) -> Facts:
        """Read the facts of a model and its optimizers; nothing runs, moves or is allocated."""
        from speedkit_jupyter.machines import flags

        parameters, modules = list(model.parameters()), list(model.modules())
        tensors = [*parameters, *model.buffers()]
        shaped = [parameter for parameter in parameters if not is_lazy(parameter)]
        devices = Counter(tensor.device for tensor in tensors)
        gradients = [parameter.nbytes for parameter in shaped if parameter.requires_grad]
        layered = layers(model)
        return cls(
            device=str(devices.most_common(1)[0][0]) if devices else "cpu",
            devices=words(devices) or ("cpu",),
            dtypes=words(p.dtype for p in parameters),
            parameters=sum(p.numel() for p in shaped),
            linears=sum(map(is_linear, modules)),
            lstms=sum(isinstance(m, torch.nn.LSTM) for m in modules),
            fresh_bytes=sum(n for n in gradients if n >= LARGE_BYTES),
            own_checkpointing=_own_checkpointing(modules),
            training=any(getattr(module, "training", False) for module in modules),
            frozen=bool(parameters) and not any(p.requires_grad for p in parameters),
            lazy=any(map(is_lazy, tensors)),
            compiled=_compiled(layered),
            classes=Counter(map(type, modules)),
            optimizers=tuple(OptimizerFacts.read(o, [model]) for o in each_once(optimizers)),
            flags=flags.snapshot(),
            **_convolutions(modules),
            **_blocks(layered[-1]),
            **processes_of(layered),
        )


def _convolutions(modules: Iterable[torch.nn.Module]) -> dict[str, Any]:
    convolutions = list(filter(is_convolution, modules))
    dims = {weight_of(convolution).dim() for convolution in convolutions}
    return {
        "convolutions": len(convolutions),
        "convolution_dims": tuple(sorted(dims)) or (4,),
        "channels_last": sum(map(is_channels_last, convolutions)),
    }


def _blocks(model: torch.nn.Module) -> dict[str, Any]:
    """Return the repeated blocks as fields of the facts, with the names of uncompiled blocks."""
    repeated = repeated_blocks(model)
    plain = {id(block) for block in repeated if not is_compiled_by_user(block)}
    named = {name: m for name, m in model.named_modules() if plain and id(m) in plain}
    parameters = [p for block in repeated for p in block.parameters() if not is_lazy(p)]
    homes = [str(getattr(type(one).forward, "__module__", "")) for one in named.values()]
    return {
        "blocks": len(repeated),
        "block_classes": distinct(type(block).__name__ for block in repeated),
        "block_kinds": len(set(map(shapes, repeated))),
        "block_parameters": sum(p.numel() for p in parameters),
        "block_names": tuple(named),
        "blocks_of_torch": any(home.startswith("torch.") for home in homes),
    }


def _compiled(layered: Sequence[torch.nn.Module]) -> Compiled:
    if any(isinstance(layer, torch.jit.ScriptModule) for layer in layered):
        return "script"
    if any(COMPILED_CHILD in module_table(layer) for layer in layered):
        return "wrapper"
    return "in place" if any(map(is_compiled_by_user, layered)) else "no"


def _own_checkpointing(modules: Iterable[torch.nn.Module]) -> OwnCheckpointing:
    every = (attribute(module, "gradient_checkpointing") for module in modules)
    words = [word for word in every if isinstance(word, bool)]
    return "on" if True in words else "off" if False in words else "none"


def processes_of(layered: Sequence[torch.nn.Module]) -> dict[str, Any]:
    """Return processes, hosts and launcher as fields of the facts; empty without a group."""
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

    lightning = ("lightning.", "pytorch_lightning.")
    wrappers = (DistributedDataParallel, FullyShardedDataParallel, FSDPModule)
    for layer in layered:
        if isinstance(layer, wrappers):
            return type(layer).__name__
        modules = [kind.__module__ for kind in type(layer).__mro__]
        if any(name.startswith(lightning) for name in modules):
            return "Lightning"
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    return "Accelerate" if getattr(state, "_shared_state", None) else ""

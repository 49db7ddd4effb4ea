"""Facts about a model and its optimizers, read for planning."""

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

from speedkit_jupyter.catalog.model_changes.calls import is_compiled_by_user
from speedkit_jupyter.catalog.model_changes.tensors import (
    is_channels_last,
    settings_of_user,
    weight_of,
)
from speedkit_jupyter.support.wrappers import each_once, layers
from speedkit_jupyter.torchglue.modules import COMPILED_CHILD, module_table, parameter_table

# When tensors of this size or more are freed, glibc returns their memory to the system.
LARGE_BYTES = 32 << 20
Compiled = Literal["no", "in place", "wrapper", "script"]
OwnCheckpointing = Literal["none", "off", "on"]  # gradient checkpointing of a Hugging Face model
Group = list[torch.nn.Module]


def is_convolution(module: torch.nn.Module) -> bool:
    """Return whether a module is a 2-D or 3-D (transposed) convolution; False for lazy weights."""
    convolution: Any = torch.nn.Conv2d.__base__
    weight = parameter_table(module).get("weight") if isinstance(module, convolution) else None
    return weight is not None and not is_lazy(weight) and weight.dim() in (4, 5)


def is_linear(module: torch.nn.Module) -> bool:
    """Return whether a module is `nn.Linear`, but not MultiheadAttention's `out_proj`."""
    return isinstance(module, torch.nn.Linear) and not isinstance(module, Lending)


def adapters_in(model: torch.nn.Module) -> set[torch.nn.Module]:
    """Return the model's peft modules: layers with a `base_layer`, and the adapters inside them."""
    adapted: list[Any] = [part for part in model.modules() if hasattr(part, "base_layer")]
    inside = {one for part in adapted for one in part.modules()}
    return inside.difference(*(part.base_layer.modules() for part in adapted))


def has_lazy_parameters(holder: torch.nn.Module | torch.optim.Optimizer) -> bool:
    """Return whether a parameter or buffer has no shape yet; False for an optimizer."""
    if isinstance(holder, torch.optim.Optimizer):
        return False
    return any(map(is_lazy, (*holder.parameters(), *holder.buffers())))


def attribute(module: torch.nn.Module, name: str) -> Any:
    """Return an instance or class attribute, or None; faster than `getattr` on a module."""
    return vars(module).get(name, getattr(type(module), name, None))


def repeated_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the model's repeated blocks in order, without nested blocks.

    Repeated blocks are two or more modules of one class in a ModuleList, ModuleDict or Sequential.
    They have submodules, and at least two have tensors of equal names and shapes.
    """
    groups = [(module, *pair) for module in model.modules() for pair in _siblings(module)]
    kinds = {kind for _, kind, group in groups if _has_equals(group)}
    blocks, inside = set[int](), set[int]()
    for module, kind, group in groups:  # outer blocks first
        if kind in kinds and id(module) not in inside:
            blocks |= set(map(id, group))
            inside |= {id(part) for block in group for part in block.modules()}
    return [module for module in model.modules() if id(module) in blocks]


def _siblings(module: torch.nn.Module) -> list[tuple[Any, Group]]:
    """Return (kind, children) for each kind with two or more children; empty for non-containers."""
    found: dict[Any, Group] = {}
    if isinstance(module, torch.nn.ModuleList | torch.nn.Sequential | torch.nn.ModuleDict):
        for child in module.children():
            found.setdefault(_kind(child), []).append(child)
    return [(kind, group) for kind, group in found.items() if len(group) > 1]


def _has_equals(group: Group) -> bool:
    """Return whether two modules have equal, nonempty `shapes`; False for lists and leaves."""
    is_list = isinstance(group[0], torch.nn.ModuleList | torch.nn.ModuleDict)
    if is_list or not any(True for _ in group[0].children()):
        return False
    found = Counter(map(shapes, group))
    return any(count > 1 and shape for shape, count in found.items())


def _kind(module: torch.nn.Module) -> Any:
    """Return the module's class; for a plain Sequential, also the kinds of its children."""
    if type(module) is not torch.nn.Sequential:
        return type(module)
    return (type(module), *map(_kind, module.children()))


def shapes(module: torch.nn.Module) -> tuple[Any, ...]:
    """Return names and shapes of parameters and buffers; a shape not yet known is None."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return tuple((name, None if is_lazy(t) else tuple(t.shape)) for name, t in tensors)


@dataclass(frozen=True)
class OptimizerFacts:
    """The facts of one optimizer, with the user's settings even while a plan overrides them."""

    name: str = "AdamW"
    has_fused: bool = True
    fused: tuple[bool | None, ...] = (None,)  # distinct values of the parameter groups
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
        """Return an optimizer's facts; `models` tell which gradients will be sparse."""
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
    """Return the distinct values in order of first appearance."""
    return tuple(dict.fromkeys(values))


def words(values: Iterable[torch.device | torch.dtype]) -> tuple[str, ...]:
    """Return the distinct devices or dtypes as text: `cuda:0`, `float32`."""
    return distinct(str(value).removeprefix("torch.") for value in values)


@dataclass(frozen=True)
class Facts:
    """The facts of a model, its optimizers and the process.

    `Facts.read(model, optimizers)` reads the facts. The defaults describe a float32 model on a CPU.
    """

    device: str = "cpu"  # the device of most tensors: "cpu", "cuda:0"
    devices: tuple[str, ...] = ("cpu",)
    dtypes: tuple[str, ...] = ("float32",)  # the dtypes of the parameters
    parameters: int = 0
    convolutions: int = 0
    frozen_convolutions: int = 0
    convolution_dims: tuple[int, ...] = (4,)  # dimensions of the convolution weights: 4, 5
    channels_last: int = 0
    linears: int = 0
    lstms: int = 0
    blocks: int = 0  # number of repeated blocks, such as the layers of a transformer
    block_classes: tuple[str, ...] = ()
    block_kinds: int = 0  # number of kinds of blocks, by names and shapes of tensors
    block_parameters: int = 0  # parameters in all blocks
    own_checkpointing: OwnCheckpointing = "none"
    training: bool = True  # True if some module is in training mode
    frozen: bool = False  # True if there are parameters, and none requires gradients
    lazy: bool = False  # True if some parameter or buffer has no shape yet
    compiled: Compiled = "no"
    classes: Mapping[type[torch.nn.Module], int] = field(default_factory=dict)  # modules per class
    block_names: tuple[str, ...] = ()  # names of blocks that the user has not compiled
    blocks_of_torch: bool = False  # True if one of these blocks has torch's own `forward`
    optimizers: tuple[OptimizerFacts, ...] = ()
    optimizers_later: bool = False  # True if optimizers may be created after planning
    precision: str = "fp32"  # planning sets this field and the next three
    graphed: bool = False  # True if calls are recorded as CUDA graphs
    recomputed: bool = False  # True if the backward pass recomputes the blocks' activations
    quantized: str = ""  # name of the optimization that quantizes weights
    # Bytes that a step requests from the operating system: measured, or estimated as the total
    # size of all gradients that have LARGE_BYTES or more each.
    fresh_bytes: int = 0
    step_s: float = 0.0  # measured seconds per step; 0 if not measured
    lengths_vary: bool = False  # True if calls in a measured step had inputs of several lengths
    decodes: bool = False  # True if the measured step passes a key-value cache to a model
    processes: int = 1  # number of processes in torch.distributed's default group
    hosts: int = 1  # number of hosts that run these processes
    launcher: str = ""  # the framework or torch class that distributes the model, if any
    flags: Mapping[str, Any] = field(default_factory=dict)  # `flags.snapshot()`

    @property
    def device_type(self) -> str:
        """Return the device type without an index: "cpu", "cuda", "mps", "xpu"."""
        return self.device.partition(":")[0]

    @property
    def convolves(self) -> bool:
        """Return whether the model has more convolutions than linear layers."""
        return self.convolutions > self.linears

    @property
    def no_float32(self) -> str:
        """Return the parameters' dtypes as text if none is float32; else an empty string."""
        return "" if not self.parameters or "float32" in self.dtypes else ", ".join(self.dtypes)

    def stepped_by(self, optimizers: Sequence[OptimizerFacts]) -> Facts:
        """Return the facts with `optimizers` added; optimizers with equal facts count once."""
        union = tuple(dict.fromkeys((*self.optimizers, *optimizers)))
        return replace(self, optimizers=union) if optimizers else self

    def moved(self, device: str) -> Facts:
        """Return the facts of the model on another device, for decisions that follow a move."""
        optimizers = tuple(replace(one, devices=(device,)) for one in self.optimizers)
        return replace(self, device=device, devices=(device,), optimizers=optimizers)

    @classmethod
    def read(cls, model: torch.nn.Module, optimizers: Sequence[Any] = ()) -> Facts:
        """Return the facts of a model and its optimizers, without running or moving anything."""
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
        "frozen_convolutions": sum(not weight_of(one).requires_grad for one in convolutions),
    }


def _blocks(model: torch.nn.Module) -> dict[str, Any]:
    """Return the Facts fields about repeated blocks; `block_names` omits user-compiled blocks."""
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
    """Return Facts fields: `processes`, `hosts`, `launcher`; empty without a process group."""
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

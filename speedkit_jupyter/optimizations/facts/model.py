"""What a model and its optimizers are: read once, before anything is decided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from speedkit_jupyter.optimizations.attention.timings import Measured, kept
from speedkit_jupyter.optimizations.facts import backends, denormal_numbers
from speedkit_jupyter.optimizations.facts.blocks import repeated_blocks
from speedkit_jupyter.optimizations.facts.conv_norms import number_of_norms
from speedkit_jupyter.optimizations.facts.flattening import flattens
from speedkit_jupyter.optimizations.facts.fusible import Fusible, fusible
from speedkit_jupyter.optimizations.properties.calls import users_own as compiled_by_the_user
from speedkit_jupyter.optimizations.properties.settings import users_own
from speedkit_jupyter.optimizations.rewriting.rewritable import Rewritable, rewritable
from speedkit_jupyter.support.wrappers import each_once, layers

if TYPE_CHECKING:
    import torch

Compiled = Literal["no", "in place", "wrapper", "script"]
# Gradient checkpointing as Hugging Face models bring it along.
OwnCheckpointing = Literal["none", "off", "on"]


@dataclass(frozen=True)
class OptimizerFacts:
    """One optimizer. `fused` and `foreach` hold the distinct values of its groups, as the user set
    them: what a plan on another model of the same optimizer put there does not count. `flattens`
    says that its step needs gradients that are contiguous in memory; `sparse_gradients`, that it
    holds a parameter whose gradients are sparse.
    """

    name: str = "AdamW"
    has_fused: bool = True
    fused: tuple[bool | None, ...] = (None,)
    foreach: tuple[bool | None, ...] = (None,)
    differentiable: bool = False
    capturable: bool = False
    devices: tuple[str, ...] = ("cpu",)
    dtypes: tuple[str, ...] = ("float32",)
    flattens: bool = False
    sparse_gradients: bool = False

    @classmethod
    def read(
        cls, optimizer: torch.optim.Optimizer, models: Iterable[torch.nn.Module] = ()
    ) -> OptimizerFacts:
        """Read the facts of one, which steps parameters of these models."""
        groups = optimizer.param_groups
        parameters = [p for group in groups for p in group["params"]]
        sparse = {id(p) for model in models for p in _with_sparse_gradients(model)}
        settings = [users_own(optimizer, group) for group in groups]
        own_step = type(optimizer).step.__module__.startswith("torch.optim")
        return cls(
            name=type(optimizer).__name__,
            has_fused=own_step and all("fused" in group for group in groups),
            fused=_distinct(values.get("fused") for values in settings),
            foreach=_distinct(values.get("foreach") for values in settings),
            differentiable=any(group.get("differentiable") for group in groups),
            capturable=any(group.get("capturable") for group in groups),
            devices=_words(p.device for p in parameters),
            dtypes=_words(p.dtype for p in parameters),
            flattens=flattens(optimizer),
            sparse_gradients=any(id(p) in sparse or _has_sparse_gradient(p) for p in parameters),
        )


@dataclass(frozen=True)
class Facts:
    """A model, its optimizers (those behind wrappers) and the process that they are in.

    `device` is where most parameters lie ("cpu", "cuda:0"); `dtypes` are the parameters' own;
    `convolution_dims` are the dimensions of the convolutions' weights (4, 5), and
    `others_of_such_dims` says that other parameters or buffers have 4 or 5 too;
    `denormals` is the share of numbers, in a sample, that are denormal;
    `flags` is the `flags.snapshot()` of that moment. `optimizers_later` says that optimizers may
    be made after planning, as they mostly are. `blocks` is how many blocks the model repeats,
    `block_classes` the names of their classes; `training` says that some module is in training
    mode, `lazy` that some have no shape yet. `precision`, `passed_by` (what compiled code would
    pass by) and `compiles` are filled in while planning. `rewritable` are the modules that
    `rewrites` can make others of, `fusible` those that `fused_kernels` has a kernel for.
    `block_names` are those of the repeated blocks that are not compiled yet, `blocks_of_torch` says
    that their forward is torch's own; `backends` are those of torch.compile that are loaded.
    `quantized` says which optimization multiplies in the stead of the weights. `attention` is what
    each kernel took on the calls that the model's step makes, where that was measured.
    """

    device: str = "cpu"
    devices: tuple[str, ...] = ("cpu",)
    dtypes: tuple[str, ...] = ("float32",)
    parameters: int = 0
    convolutions: int = 0
    convolution_dims: tuple[int, ...] = (4,)
    others_of_such_dims: bool = False
    channels_last: int = 0
    linears: int = 0
    attentions: int = 0
    lstms: int = 0
    denormals: float = 0.0
    blocks: int = 0
    block_classes: tuple[str, ...] = ()
    own_checkpointing: OwnCheckpointing = "none"
    batch_norms: int = 0
    training: bool = True
    lazy: bool = False
    compiled: Compiled = "no"
    rewritable: tuple[Rewritable, ...] = ()
    fusible: tuple[Fusible, ...] = ()
    block_names: tuple[str, ...] = ()
    blocks_of_torch: bool = False
    backends: tuple[str, ...] = backends.OWN
    optimizers: tuple[OptimizerFacts, ...] = ()
    optimizers_later: bool = False
    precision: str = "fp32"
    passed_by: str = ""
    compiles: bool = False
    quantized: str = ""
    attention: tuple[Measured, ...] = ()
    flags: Mapping[str, Any] = field(default_factory=dict)

    @property
    def device_type(self) -> str:
        """The device without its index: "cpu", "cuda", "mps", "xpu"."""
        return self.device.partition(":")[0]

    def stepped_by(self, optimizers: Sequence[OptimizerFacts]) -> Facts:
        """The same facts with such optimizers beside those that it has; alike ones count once."""
        if not optimizers:
            return self
        union = tuple(dict.fromkeys((*self.optimizers, *optimizers)))
        return replace(self, optimizers=union)

    def moved(self, device: str) -> Facts:
        """The same facts on another device, for the decisions that follow a move."""
        optimizers = tuple(replace(optimizer, devices=(device,)) for optimizer in self.optimizers)
        return replace(self, device=device, devices=(device,), optimizers=optimizers)

    @classmethod
    def read(
        cls, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer] = ()
    ) -> Facts:
        """Read the facts. Nothing is run, moved or allocated on a device.

        Every user pays for this at each plan: the model is gone through as few times as may be.
        """
        import torch
        from torch.nn.modules.conv import _ConvNd
        from torch.nn.parameter import is_lazy

        from speedkit_jupyter.machines import flags

        parameters, modules = list(model.parameters()), list(model.modules())
        tensors = [*parameters, *model.buffers()]
        shaped = [tensor for tensor in tensors if not is_lazy(tensor)]
        convolutions = [m for m in modules if isinstance(m, _ConvNd) and is_convolution(m)]
        weights = {id(weight): weight for weight in map(_weight, convolutions)}
        devices = Counter(tensor.device for tensor in tensors)
        layered, repeated = layers(model), repeated_blocks(model)
        blocks = _blocks(layered[-1], repeated if layered[-1] is model else None)
        return cls(
            device=str(devices.most_common(1)[0][0]) if devices else "cpu",
            devices=_words(devices) or ("cpu",),
            dtypes=_words(p.dtype for p in parameters),
            parameters=sum(p.numel() for p in parameters if not is_lazy(p)),
            convolutions=len(convolutions),
            convolution_dims=tuple(sorted({weight.dim() for weight in weights.values()})) or (4,),
            others_of_such_dims=any(t.dim() in (4, 5) and id(t) not in weights for t in shaped),
            channels_last=sum(map(is_channels_last, convolutions)),
            linears=sum(isinstance(m, torch.nn.Linear) and is_linear(m) for m in modules),
            attentions=sum(isinstance(m, torch.nn.MultiheadAttention) for m in modules),
            lstms=sum(isinstance(m, torch.nn.LSTM) for m in modules),
            denormals=denormal_numbers.share(tensors, each_once(optimizers)),
            blocks=len(repeated),
            block_classes=_distinct(type(block).__name__ for block in repeated),
            own_checkpointing=_own_checkpointing(modules),
            batch_norms=number_of_norms(modules),
            training=any(module.training for module in modules),
            lazy=len(shaped) < len(tensors),
            compiled=_compiled(layered),
            rewritable=tuple(place for place, _ in rewritable(model)),
            fusible=tuple(place for place, _ in fusible(model)),
            block_names=tuple(blocks),
            blocks_of_torch=any(map(_has_forward_of_torch, blocks.values())),
            backends=backends.loaded(),
            optimizers=tuple(
                OptimizerFacts.read(optimizer, [model]) for optimizer in each_once(optimizers)
            ),
            attention=kept(model),
            flags=flags.snapshot(),
        )


def is_convolution(module: torch.nn.Module) -> bool:
    """Whether this is a 2-D or 3-D convolution with a plain weight that can be laid out anew."""
    from torch.nn.modules.conv import _ConvNd
    from torch.nn.parameter import is_lazy

    weight = module._parameters.get("weight") if isinstance(module, _ConvNd) else None
    return weight is not None and not is_lazy(weight) and weight.dim() in (4, 5)


def is_linear(module: torch.nn.Module) -> bool:
    """Whether this is a linear layer that multiplies by itself: the last one of torch's attention
    only lends its weight.
    """
    import torch
    from torch.nn.modules.linear import NonDynamicallyQuantizableLinear as Lending

    return isinstance(module, torch.nn.Linear) and not isinstance(module, Lending)


def _with_sparse_gradients(model: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """The weights of `Embedding(sparse=True)` and of all that has such a switch."""
    for module in model.modules():
        if _attribute(module, "sparse") is True:
            yield from module.parameters(recurse=False)


def _has_sparse_gradient(parameter: torch.Tensor) -> bool:
    """Now: a function can make it so, without a module that says it."""
    import torch

    gradient = parameter.grad if parameter.is_leaf else None
    return gradient is not None and gradient.layout is not torch.strided


def _weight(convolution: torch.nn.Module) -> torch.nn.Parameter:
    weight = convolution._parameters["weight"]
    assert weight is not None
    return weight


def has_lazy_parameters(holder: torch.nn.Module | torch.optim.Optimizer) -> bool:
    """Whether some parameter gets its shape at the first forward pass only."""
    import torch
    from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

    if isinstance(holder, torch.optim.Optimizer):
        return False
    tensors = (*holder.parameters(), *holder.buffers())
    return any(isinstance(tensor, UninitializedTensorMixin) for tensor in tensors)


def channels_last_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of a 4-D or 5-D tensor of this shape with its channels last, in elements."""
    return _channels_last_stride(tuple(tensor.shape))


@lru_cache(maxsize=1024)
def _channels_last_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    import torch

    layout = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    return torch.empty(shape, memory_format=layout, device="meta").stride()


def is_channels_last(convolution: torch.nn.Module) -> bool:
    """Whether the weight lies in memory with its channels last.

    By its strides: with one channel or a 1x1 kernel both layouts hold the same bytes in the same
    order, and yet torch's kernels choose by the strides.
    """
    weight = _weight(convolution)
    return weight.stride() == channels_last_stride(weight)


def _compiled(layered: Sequence[torch.nn.Module]) -> Compiled:
    import torch

    if any(isinstance(layer, torch.jit.ScriptModule) for layer in layered):
        return "script"
    if any("_orig_mod" in layer._modules for layer in layered):
        return "wrapper"
    return "in place" if any(map(compiled_by_the_user, layered)) else "no"


def _blocks(
    inner: torch.nn.Module, repeated: Sequence[torch.nn.Module] | None
) -> dict[str, torch.nn.Module]:
    """By name, as in the model behind its wrappers; `repeated` are its own, where known."""
    repeated = repeated_blocks(inner) if repeated is None else repeated
    ids = {id(block) for block in repeated if not compiled_by_the_user(block)}
    if not ids:
        return {}
    return {name: module for name, module in inner.named_modules() if id(module) in ids}


def _has_forward_of_torch(module: torch.nn.Module) -> bool:
    return str(getattr(type(module).forward, "__module__", "")).startswith("torch.")


def _own_checkpointing(modules: Iterable[torch.nn.Module]) -> OwnCheckpointing:
    words = [_attribute(module, "gradient_checkpointing") for module in modules]
    if any(word is True for word in words):
        return "on"
    return "off" if any(word is False for word in words) else "none"


def _attribute(module: torch.nn.Module, name: str) -> Any:
    """Its own or its class's; a module looks long for what it does not have."""
    return vars(module).get(name, getattr(type(module), name, None))


def _words(values: Iterable[torch.device | torch.dtype]) -> tuple[str, ...]:
    """`cuda:0`, `float32`, each once."""
    return tuple(str(value).removeprefix("torch.") for value in dict.fromkeys(values))


def _distinct(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(values))

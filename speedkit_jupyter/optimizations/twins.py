"""Weights with a twin of fewer bits, which multiplies in their stead.

The user's own parameter stays in its place: the same object, the same bits in the same memory. Only
its class is another meanwhile, one whose `F.linear` takes the twin. So whoever else holds the
parameter (a tied embedding, an optimizer, a `state_dict()`, a copy, a file) has what it would have
without a plan.

A twin is a tensor, which was made of the weight's values: for inference, so that where gradients
are recorded the weights themselves multiply. Or it is a layer, which reads the weight and gives it
its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.optimizations.properties import Optimizers, Property
from speedkit_jupyter.support.threads import is_here, is_pythons

if TYPE_CHECKING:
    import torch

# What lies on a parameter while it has a twin.
OURS = ("_speedkit_twin", "_speedkit_recipe", "_speedkit_seen")


@dataclass(eq=False)
class Recipe:
    """How the twins of one plan are made: tensors by `make(values)`, layers by `make(weight)`.

    `kept` holds tensors that were made, with a checksum of what they were made of: plans are hidden
    and come back. `trained` is called where gradients are recorded, so that none of them
    multiplies. In a benchmark it is for one `thread`; other threads multiply by the weights.
    """

    name: str
    make: Callable[[Any], Any]
    kept: MutableMapping[torch.Tensor, tuple[list[torch.Tensor], torch.Tensor]]
    trained: Callable[[], None]
    thread: int | None = None
    makes_layers: bool = False

    def twin(self, weight: torch.Tensor) -> Any:
        """That of the weight as it is now."""
        import torch

        if self.makes_layers:
            return self.make(weight)
        with torch.no_grad(), torch.inference_mode(False):
            with torch._C.DisableTorchFunctionSubclass():
                now, (before, twin) = weight.detach(), self.kept.get(weight, ([], None))
            bits = _checksum(now)
            if twin is None or not _are_equal(before, bits):
                with torch.autocast(now.device.type, enabled=False):
                    twin = self.make(now)
                with torch._C.DisableTorchFunctionSubclass():
                    self.kept[weight] = bits, twin
            return twin

    def is_for_here(self) -> bool:
        """Whether this thread multiplies by twins; autograd's own computes what it needs again."""
        return self.thread is None or is_here(self.thread) or not is_pythons()


class Twins(Property):
    """Which recipe a weight's twin is made by."""

    def found(self, thing: torch.Tensor, optimizers: Optimizers) -> type:
        """Its class."""
        return type(thing)

    def put(self, thing: Any, wish: Recipe, optimizers: Optimizers) -> None:
        """The twin first, then the class that asks for it."""
        thing._speedkit_twin = wish.twin(thing)
        thing._speedkit_recipe, thing._speedkit_seen = wish, _seen(thing)
        thing.__class__ = _twinned()

    def holds(self, thing: torch.Tensor, wish: Recipe) -> bool:
        """Whether it has a twin of this recipe."""
        return recipe_of(thing) is wish

    def put_back(self, thing: Any, original: type, wish: Recipe, optimizers: Optimizers) -> None:
        """Its class, and nothing of ours on it."""
        if type(thing) is _twinned():
            thing.__class__ = original
        for name in OURS:
            thing.__dict__.pop(name, None)


# State at module level, on purpose: what lies on a weight is known for the whole process.
TWINS = Twins()


def recipe_of(weight: Any) -> Recipe | None:
    """By which its twin is made; None where it has none."""
    recipe = getattr(weight, "__dict__", {}).get("_speedkit_recipe")
    return recipe if isinstance(recipe, Recipe) else None


@cache
def _twinned() -> type[torch.nn.Parameter]:
    """The class of weights that have twins; torch's compiler reads all of it."""
    import torch
    from torch.nn.functional import linear

    def named(input: Any, weight: Any, bias: Any = None) -> tuple[Any, Any, Any]:
        return input, weight, bias

    class Twinned(torch.nn.Parameter):
        """A parameter of the user's while a plan is in force on it."""

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            """The product by the twin; all else as of any parameter."""
            kwargs = kwargs or {}
            if func is linear:
                input, weight, bias = named(*args, **kwargs)
                twin = _twin(input, weight, bias) if isinstance(weight, Twinned) else None
                if isinstance(twin, torch.nn.Module):
                    result = twin.forward(input)  # no hooks: it is no layer of the model
                    return result if bias is None else result + bias.to(result.dtype)
                if twin is not None:
                    return linear(input, twin, bias)
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
            if not torch.compiler.is_compiling():
                _notice(func, args)
            return result

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            if id(self) not in memo:
                memo[id(self)] = _as_it_was(self).__deepcopy__({})
            return memo[id(self)]

        def __reduce_ex__(self, proto: Any) -> Any:
            return _as_it_was(self).__reduce_ex__(proto)

    return Twinned


def _is_trained(*tensors: Any) -> bool:
    """Whether the product would be recorded for a backward pass."""
    import torch

    if not torch.is_grad_enabled():
        return False
    with torch._C.DisableTorchFunctionSubclass():
        recorded = any(tensor is not None and tensor.requires_grad for tensor in tensors)
    if recorded and not torch.compiler.is_compiling() and (recipe := recipe_of(tensors[1])):
        recipe.trained()
    return recorded


def _twin(input: Any, weight: Any, bias: Any) -> Any:
    """That of the weight, made anew where the weight has changed; None where torch's own product
    is wanted: of what is no plain input, while the model is written down, in other threads than the
    measured one, where one for inference would be trained.
    """
    import torch

    twin = getattr(weight, "_speedkit_twin", None)
    if twin is None or torch.compiler.is_exporting():
        return None
    if isinstance(twin, torch.Tensor) and _is_trained(input, weight, bias):
        return None
    if torch.compiler.is_compiling():
        return twin if _suits(input, twin) else None
    recipe = recipe_of(weight)
    if recipe is None or not recipe.is_for_here():
        return None
    if _is_transformed(input) or not _suits(input, twin):
        return None
    if isinstance(twin, torch.Tensor) and weight._speedkit_seen != _seen(weight):
        _renew(weight, recipe)
    return getattr(weight, "_speedkit_twin", None)


def _suits(input: Any, twin: Any) -> bool:
    """Whether there is something to multiply, and it fits; what is wrong torch itself shall say."""
    import torch

    if input.is_nested or input.layout is not torch.strided or not input.is_floating_point():
        return False
    is_tensor = isinstance(twin, torch.Tensor)
    if is_tensor and input.device != twin.device:
        return False
    width = twin.shape[-1] if is_tensor else twin.in_features
    return bool(input.numel() > 0 and input.shape[-1] == width)


def _is_transformed(input: Any) -> bool:
    """Whether it is traced, batched, or carries derivatives, which rounding would lose."""
    import torch
    from torch.autograd import forward_ad

    return (
        torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
        or bool(torch._C._functorch.is_functorch_wrapped_tensor(input))
    )


def _renew(weight: Any, recipe: Recipe) -> None:
    weight._speedkit_twin = recipe.twin(weight)
    weight._speedkit_seen = _seen(weight)


def _notice(func: Any, args: Any) -> None:
    """Compiled code can't ask whether a weight was written: it is looked at once it may have been.

    What `.data` writes goes by unseen, so that it is looked at before the next product.
    """
    import torch

    weight: Any = args[0] if args else None
    recipe = recipe_of(weight)
    if recipe is None or recipe.makes_layers:
        return
    if func == torch.Tensor.data.__get__:  # type: ignore[attr-defined]
        weight._speedkit_seen = None
    elif weight._speedkit_seen not in (None, _seen(weight)):
        _renew(weight, recipe)


def _seen(weight: torch.Tensor) -> tuple[Any, ...]:
    """What is another once a weight was written."""
    import torch

    with torch._C.DisableTorchFunctionSubclass():
        version = None if weight.is_inference() else weight._version
        return version, weight.data_ptr(), weight.dtype, weight.device, weight.shape


def _as_it_was(weight: Any) -> Any:
    """A parameter of torch's own class over the same memory, with all that the user put on it."""
    import torch

    with torch._C.DisableTorchFunctionSubclass():
        same = torch.Tensor._make_subclass(torch.nn.Parameter, weight.data, weight.requires_grad)
    same.__dict__.update({k: v for k, v in weight.__dict__.items() if k not in OURS})
    return same


def _checksum(weight: torch.Tensor) -> list[torch.Tensor]:
    """Sums of the bits of each row and of each column."""
    import torch

    whole = {2: torch.int16, 4: torch.int32}[weight.element_size()]
    bits = weight.contiguous().view(whole)
    return [bits.sum(dimension, dtype=torch.int64) for dimension in (0, 1)]


def _are_equal(before: list[torch.Tensor], bits: list[torch.Tensor]) -> bool:
    import torch

    return before[0].device == bits[0].device and all(map(torch.equal, before, bits))

"""The class of a parameter while something multiplies in its stead."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.optimizations.twins.recipe import Recipe, recipe_of, seen
from speedkit_jupyter.support.storage import is_in_memory

if TYPE_CHECKING:
    import torch

# What lies on a parameter while it has a twin.
OURS = ("_speedkit_twin", "_speedkit_recipe", "_speedkit_seen")


def internals() -> tuple[Any, ...]:
    """What this stands on and torch does not promise. Raises AttributeError where torch has moved
    one of them.
    """
    import torch
    from torch.autograd import forward_ad

    return (
        torch._C.DisableTorchFunctionSubclass,
        torch._C._get_tracing_state,
        torch._C._functorch.is_functorch_wrapped_tensor,
        torch.Tensor._make_subclass,
        torch._int_mm,
        forward_ad._current_level,
    )


@cache
def twinned() -> type[torch.nn.Parameter]:
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
                    product = in_rows if weight._speedkit_recipe.casts else linear
                    return product(input, twin, bias)
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


def in_rows(input: Any, twin: Any, bias: Any) -> Any:
    """The product by kernels that take rows of their own dtype alone, and know no autocast: it is
    of the dtype that torch's own would have.
    """
    import torch
    from torch.nn.functional import linear

    kind = input.device.type
    wanted = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
    with torch.autocast(kind, enabled=False):
        rows = input.reshape(-1, input.shape[-1]).to(twin.dtype).contiguous()
        result = linear(rows, twin, None if bias is None else bias.to(twin.dtype))
    return result.to(wanted).reshape(*input.shape[:-1], result.shape[-1])


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
        return twin if _suits(input, weight, twin) else None
    recipe = recipe_of(weight)
    if recipe is None or not recipe.is_for_here():
        return None
    if _is_transformed(input) or not _suits(input, weight, twin):
        return None
    if isinstance(twin, torch.Tensor) and weight._speedkit_seen != seen(weight):
        return _renewed(weight, recipe)
    return twin


def _suits(input: Any, weight: Any, twin: Any) -> bool:
    """Whether there is something to multiply, and it fits; what is wrong torch itself shall say."""
    import torch

    if input.is_nested or input.layout is not torch.strided or not input.is_floating_point():
        return False
    is_tensor = isinstance(twin, torch.Tensor)
    if is_tensor and input.device != twin.device:
        return False
    is_other = weight._speedkit_recipe.casts and input.dtype != weight.dtype
    if is_other and not torch.is_autocast_enabled(input.device.type):
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


def _renewed(weight: Any, recipe: Recipe) -> Any:
    """The twin of the weight as it is now; None where its memory was given back meanwhile."""
    import torch

    with torch._C.DisableTorchFunctionSubclass():
        if not is_in_memory(weight):
            return None
    weight._speedkit_twin = recipe.twin(weight)
    weight._speedkit_seen = seen(weight)
    return weight._speedkit_twin


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
    elif weight._speedkit_seen not in (None, seen(weight)):
        _renewed(weight, recipe)


def _as_it_was(weight: Any) -> Any:
    """A parameter of torch's own class over the same memory, with all that the user put on it."""
    import torch

    with torch._C.DisableTorchFunctionSubclass():
        same = torch.Tensor._make_subclass(torch.nn.Parameter, weight.data, weight.requires_grad)
    same.__dict__.update({k: v for k, v in weight.__dict__.items() if k not in OURS})
    return same

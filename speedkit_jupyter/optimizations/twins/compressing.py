"""Linear layers multiplied by twins of their weights: which of them can be, and for how long."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.optimizations.base.late_optimizers import newcomers
from speedkit_jupyter.optimizations.base.target import Target
from speedkit_jupyter.optimizations.facts.layers import is_linear
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.optimizations.properties.wishes import Layer
from speedkit_jupyter.optimizations.twins.recipe import Recipe, recipe_of
from speedkit_jupyter.optimizations.twins.twinned import in_rows
from speedkit_jupyter.optimizations.twins.weights import TWINS
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.storage import is_in_memory

if TYPE_CHECKING:
    import torch

Fits = Callable[["torch.Tensor"], bool]
Make = Callable[[Any], Any]
DTYPES = ("float32", "bfloat16", "float16")
# Rows and columns of the product that shows whether there are kernels: as many as any asks for.
SMALL = 64


def unfit(facts: Facts) -> str:
    """Why nothing can multiply in the stead of this model's weights; empty where it can."""
    if facts.quantized:
        return f"{facts.quantized} multiplies in the weights' stead already"
    if not facts.linears:
        return "the model has no linear layer"
    if facts.compiled == "script":
        return "a TorchScript module multiplies by itself"
    if not {*DTYPES} & {*facts.dtypes}:
        return f"the weights are {', '.join(facts.dtypes)}: it rounds floating-point numbers"
    return ""


def training(facts: Facts) -> str:
    """Why what is for inference does not go with what is known of the model; empty otherwise."""
    trained = ", ".join(optimizer.name for optimizer in facts.optimizers)
    if not trained:
        return ""
    return (
        f"{trained} trains this model, and this is for inference only: "
        "copy.deepcopy(model) can have it"
    )


@contextmanager
def compressed(
    target: Target,
    name: str,
    weights: Sequence[torch.Tensor],
    make: Make,
    makes_layers: bool = False,
    casts: bool = False,
) -> Iterator[None]:
    """Each of these weights multiplies by what `make` makes of it.

    Tensors are for inference: what an optimizer steps is given back before. Where it `casts`, one
    product is tried beforehand; raises SpeedKitError where there are no kernels for it.
    """
    from torch.utils.weak import WeakIdKeyDictionary

    memo = target.memo
    memo.twins = WeakIdKeyDictionary() if memo.twins is None else memo.twins
    trained = partial(_note_training, target.notes, name)
    recipe = Recipe(name, make, memo.twins, trained, target.only_in, makes_layers, casts)
    if casts:
        _try(make, name, {weight.device for weight in weights})
    with ExitStack() as stack:
        layer = stack.enter_context(TWINS.wished([(weight, recipe) for weight in weights]))
        del weights  # whatever this function names lives as long as the plan
        if not makes_layers:
            welcome = partial(_give_back, layer, target.notes, name)
            stack.enter_context(newcomers(target, (), welcome))
        yield


def weights_of(model: torch.nn.Module, fits: Fits) -> list[torch.Tensor]:
    """The weights that `fits`, each once."""
    return list({id(weight): weight for weight in map(_weight, linears(model, fits))}.values())


def linears(model: torch.nn.Module, fits: Fits) -> list[torch.nn.Module]:
    """The layers that multiply by a plain weight of their own, as torchao chooses them."""
    layers = [(layer, _weight(layer)) for layer in _layers(model)]
    return [layer for layer, weight in layers if _is_plain(weight) and fits(weight)]


def counted(model: torch.nn.Module, name: str) -> dict[str, str]:
    """For reports: how many of the linear layers multiply by such twins."""
    recipes = [recipe_of(_weight(layer)) for layer in _layers(model)]
    number = sum(recipe is not None and recipe.name == name for recipe in recipes)
    return _said(name, number, len(recipes))


def expected(model: torch.nn.Module, name: str, fits: Fits) -> dict[str, str]:
    """What `counted` will say."""
    return _said(name, len(linears(model, fits)), len(_layers(model)))


def _try(make: Make, name: str, devices: Iterable[torch.device]) -> None:
    """What kernels torch was built with, for which GPUs, only a product shows."""
    import torch

    for device in devices:
        plain = torch.autocast(device.type, enabled=False)
        with torch.inference_mode(False), torch.no_grad(), plain:
            small = torch.zeros(SMALL, SMALL, dtype=torch.bfloat16, device=device)
            try:
                in_rows(small, make(small), None)
            except SpeedKitError:
                raise
            except Exception as error:
                first = (str(error).splitlines() or [""])[0]
                why = f"{type(error).__name__}: {first}"
                raise SpeedKitError(f"{name} does not work on {device} here: {why}") from None


def _layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    return list(filter(is_linear, model.modules()))


def _weight(layer: torch.nn.Module) -> Any:
    return layer._parameters.get("weight")


def _is_plain(weight: Any) -> bool:
    """Whether its class may be another for a while: no subclass of the user's or a library's."""
    import torch

    if type(weight) is not torch.nn.Parameter and recipe_of(weight) is None:
        return False
    whole = weight.dim() == 2 and weight.numel() > 0 and weight.layout is torch.strided
    known = str(weight.dtype).removeprefix("torch.") in DTYPES
    return whole and known and not weight.is_meta and is_in_memory(weight)


def _said(name: str, number: int, of: int) -> dict[str, str]:
    return {f"model.{name}": f"{number} of {of} linear layers"} if of else {}


def _note_training(notes: dict[str, str], name: str) -> None:
    notes[name] = (
        "the step records gradients, so its products are as before: it is for inference, inside "
        "torch.no_grad() or torch.inference_mode()"
    )


def _give_back(
    layer: Layer, notes: dict[str, str], name: str, optimizer: torch.optim.Optimizer
) -> None:
    """Before its first step: its weights are trained from now on."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            layer.withdraw(weight)
    optimizers = type(optimizer).__name__
    notes[name] = f"taken back before the first step of {optimizers}: it is for inference"

"""torchao, as far as it is called here: which versions fit, and its twins for linear layers."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.optimizations.base import Target
from speedkit_jupyter.optimizations.facts import Facts, is_linear
from speedkit_jupyter.optimizations.newcomers import newcomers
from speedkit_jupyter.optimizations.properties import Layer
from speedkit_jupyter.optimizations.recipe import Recipe, recipe_of
from speedkit_jupyter.optimizations.twins import TWINS
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.support.storage import is_in_memory

if TYPE_CHECKING:
    import torch

# The first whose int8 products stay right on CPUs that would overflow, and the torch that it needs.
SINCE, FITTING_TORCH = (0, 18), (2, 11)
Fits = Callable[["torch.Tensor"], bool]
DTYPES = ("float32", "bfloat16", "float16")
# Its own, and what torch says of how it registers its classes: nothing that a user could mend.
LOUD = ("torchao", "torch.utils._pytree")


def all_fit(weight: torch.Tensor) -> bool:
    """Whatever the sizes of a weight are."""
    return True


def obstacle(hardware: Hardware, facts: Facts) -> str:
    """Why the linear layers of this model can't be quantized here; empty where they can."""
    if facts.quantized:
        return f"{facts.quantized} multiplies in the weights' stead already"
    if not facts.linears:
        return "the model has no linear layer"
    if facts.compiled == "script":
        return "a TorchScript module multiplies by itself"
    if not {*DTYPES} & {*facts.dtypes}:
        return f"the weights are {', '.join(facts.dtypes)}: it rounds floating-point numbers"
    installed = hardware.libraries.get("torchao")
    if installed is None:
        return "needs torchao: pip install torchao"
    if _version(installed) < SINCE:
        return f"needs torchao {_dotted(SINCE)}; this is {installed}: pip install -U torchao"
    if _version(hardware.torch) < FITTING_TORCH:
        return f"torchao {installed} needs torch {_dotted(FITTING_TORCH)}; this is {hardware.torch}"
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
def quantized(
    target: Target,
    name: str,
    make: Callable[[Any], Any],
    fits: Fits = all_fit,
    makes_layers: bool = False,
) -> Iterator[None]:
    """Every weight that `fits` multiplies by what `make` makes of it.

    Tensors are for inference: what an optimizer steps is given back before.
    """
    from torch.utils.weak import WeakIdKeyDictionary

    memo = target.memo
    memo.twins = WeakIdKeyDictionary() if memo.twins is None else memo.twins
    thread = None if target.search else threading.get_ident()
    trained = partial(_note_training, target.notes, name)
    recipe = Recipe(name, make, memo.twins, trained, thread, makes_layers)
    weights = {id(weight): weight for weight in map(_weight, linears(target.model, fits))}
    with ExitStack() as stack:
        layer = stack.enter_context(TWINS.wished([(one, recipe) for one in weights.values()]))
        if not makes_layers:
            welcome = partial(_give_back, layer, target.notes, name)
            stack.enter_context(newcomers(target, (), welcome))
        yield


def linears(model: torch.nn.Module, fits: Fits = all_fit) -> list[torch.nn.Module]:
    """The layers that multiply by a plain weight of their own, as torchao chooses them."""
    layers = [(layer, _weight(layer)) for layer in _layers(model)]
    return [layer for layer, weight in layers if _is_plain(weight) and fits(weight)]


def counted(model: torch.nn.Module, name: str) -> dict[str, str]:
    """For reports: how many of the linear layers multiply by such twins."""
    recipes = [recipe_of(_weight(layer)) for layer in _layers(model)]
    number = sum(recipe is not None and recipe.name == name for recipe in recipes)
    return _said(name, number, len(recipes))


def expected(model: torch.nn.Module, name: str, fits: Fits = all_fit) -> dict[str, str]:
    """What `counted` will say."""
    return _said(name, len(linears(model, fits)), len(_layers(model)))


def imported(module: str = "quantization") -> Any:
    """`torchao.quantization`, or another, without its remarks on kernels for other machines.

    Raises SpeedKitError where it can't be imported.
    """
    try:
        with _quiet():
            return import_module(f"torchao.{module}")
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise SpeedKitError(f"torchao can't be imported: {type(error).__name__}: {first}") from None


def by_torchao(config: Any, weight: torch.Tensor) -> torch.Tensor:
    """The weight as `torchao.quantization.quantize_` makes it, of a layer that is nobody's."""
    import torch

    layer = torch.nn.Linear(1, 1, bias=False, device="meta")
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    imported().quantize_(layer, config)
    return layer.weight


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


@contextmanager
def _quiet() -> Iterator[None]:
    def refuse(record: logging.LogRecord) -> bool:
        return False

    loggers = [logging.getLogger(name) for name in LOUD]
    for logger in loggers:
        logger.addFilter(refuse)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(refuse)


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))

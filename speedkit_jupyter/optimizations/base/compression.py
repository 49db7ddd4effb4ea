"""What the entries have in common that multiply by fewer bits: other weights stand in for the
model's own, made by torchao or torch, and the user's parameters come back as they were.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, cast

from pydantic import BeforeValidator

from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.optimizations.base.decision import Decision, Effect, Request
from speedkit_jupyter.optimizations.base.optimization import Optimization
from speedkit_jupyter.optimizations.base.snippet import Form, Snippet, call
from speedkit_jupyter.optimizations.base.target import Target, newcomers
from speedkit_jupyter.optimizations.facts.layers import is_linear
from speedkit_jupyter.optimizations.facts.model import Facts
from speedkit_jupyter.optimizations.properties.calls import is_watched
from speedkit_jupyter.optimizations.properties.overrides import MISSING
from speedkit_jupyter.optimizations.properties.swapped import SWAPPED, Slot, StandIn
from speedkit_jupyter.support.exceptions import SpeedKitError

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16")
# The first torchao whose int8 products stay right on CPUs that would overflow.
SINCE = (0, 18)
INFERENCE = "no gradients go through these layers"
FUSED = "`compile` fuses the casts, without which it may be slower"


class Compression(Optimization):
    """By request only; one of them at a time.

    `for_training` says that optimizers may step. Rows and columns of a weight have to be
    `multiples` of these numbers; with `casts` it is made bfloat16 first. `bare` is the word that
    the name alone stands for, where it is not `true`; `since` is the first compute capability whose
    `units` multiply so.
    """

    effect = Effect.CHANGES_MODEL
    library = "torchao"
    variable = None
    undone = "the model's own weights are back, the same objects"
    for_training: ClassVar[bool] = False
    multiples: ClassVar[tuple[int, int]] = (1, 1)
    casts: ClassVar[bool] = False
    bare: ClassVar[str] = ""
    hint: ClassVar[str] = ""
    since: ClassVar[tuple[int, int]] = (0, 0)
    units: ClassVar[str] = ""

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        """Decide for it by request, where the device can and nothing trains the weights."""
        if request.value == "auto":
            return request.leave(False, "it changes the results: ask for it")
        if request.value is False:
            return request.leave(False, asked=True)
        obstacle = (
            self._in_training(facts)
            or self.missing_units(request.value, hardware, facts)
            or _unfit(facts)
            or (lacks_torchao(hardware) if self.library else "")
        )
        if obstacle:
            return request.decline(False, obstacle)
        hint = self.hint if self.for_training else "; ".join(filter(None, (INFERENCE, self.hint)))
        return request.obey(request.value, f"{facts.linears} linear layers", hint=hint)

    def _in_training(self, facts: Facts) -> str:
        if self.for_training or not facts.optimizers:
            return ""
        trained = ", ".join(optimizer.name for optimizer in facts.optimizers)
        return f"{trained} trains this model, and this is for inference: take a deepcopy of it"

    def missing_units(self, value: Any, hardware: Hardware, facts: Facts) -> str:
        """Why this device does not multiply so; empty where it does."""
        gpu = hardware.accelerator(facts.device)
        has = f"this is {facts.device if gpu is None else gpu.name}"
        if gpu is not None and gpu.is_nvidia and gpu.capability is not None and gpu.tensor_cores:
            if gpu.capability >= self.since:
                return ""
            has = f"{gpu.name} has {_dotted(gpu.capability)}"
        return f"{self.units} need compute capability {_dotted(self.since)}; {has}"

    def config(self, decision: Decision, device: torch.device) -> tuple[str, str, dict[str, Any]]:
        """Return torchao's module, the name of its config there, and the config's arguments."""
        raise NotImplementedError

    def made(self, decision: Decision, layer: torch.nn.Linear) -> Any:
        """Return what stands in for the layer's weight, a tensor, or for the layer, a module."""
        weight = own_weight(layer).detach()
        module, name, arguments = self.config(decision, weight.device)
        values = weight.bfloat16().contiguous() if self.casts else weight
        return by_torchao(getattr(torchao(module), name)(**arguments), values)

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        """Return torchao's own call, which replaces the weights for good."""
        import torch

        module, name, arguments = self.config(decision, torch.device(facts.device_type))
        rows, columns = self.multiples
        sizes = f"not (module.out_features % {rows} or module.in_features % {columns})"
        lines = [f"fits = lambda module, _: type(module) is torch.nn.Linear and {sizes}"]
        if self.casts:
            lines += ["for module in filter(lambda module: fits(module, None), model.modules()):"]
            lines += ["    module.weight.data = module.weight.data.bfloat16()"]
        config = call(name, **arguments)
        return Snippet(
            for_good(decision),
            imports=(
                f"from torchao.{module} import {name}",
                "from torchao.quantization import quantize_",
            ),
            model=(*lines, f"quantize_(model, {config}, filter_fn=fits)"),
        )

    def fits(self, decision: Decision, weight: torch.Tensor) -> bool:
        """Whether the kernels take such a weight."""
        sizes = zip(weight.shape, self.multiples, strict=True)
        return all(size % multiple == 0 for size, multiple in sizes)

    def none_fits(self, decision: Decision) -> str:
        """Return what a report says where no layer fits."""
        rows, columns = self.multiples
        return f"no linear layer fits: rows a multiple of {rows}, columns of {columns}"

    @contextmanager
    def applied(self, decision: Decision, target: Target) -> Iterator[None]:
        """Put something in for every layer that fits, but for those that an optimizer steps."""
        layers = self._layers(decision, target)
        if not layers:
            target.notes[self.name] = self.none_fits(decision)
        made: dict[torch.nn.Module, StandIn] = {
            layer: StandIn(self._made(decision, target, layer), self.name) for layer in layers
        }
        overrides = _overrides(target.model, made)
        del layers
        made.clear()
        with ExitStack() as stack:
            stack.enter_context(SWAPPED.overriding(overrides))
            del overrides  # which hold the model
            if not self.for_training:
                stack.enter_context(newcomers(target, target.live_optimizers(), self._refuse))
            yield

    def _layers(self, decision: Decision, target: Target) -> list[torch.nn.Linear]:
        live = () if self.for_training else target.live_optimizers()
        stepped = {id(p) for one in live for group in one.param_groups for p in group["params"]}
        return [
            layer
            for layer in _linears(target.model)
            if _is_plain(layer, stepped)
            and self.fits(decision, own_weight(layer))
            and not (self.for_training and layer is target.model)
        ]

    def _made(self, decision: Decision, target: Target, layer: torch.nn.Linear) -> Any:
        """Return what was made of the same bits before the plan was hidden, or make it anew."""
        import torch

        bits = _checksum(own_weight(layer).detach())
        known = target.memo.twins.get(layer)
        if known is not None and all(map(torch.equal, known[0], bits)):
            return known[1]
        with torch.no_grad(), torch.inference_mode(False), torch.autocast("cpu", enabled=False):
            made = self.made(decision, layer)
            if not isinstance(made, torch.nn.Module):
                made = torch.nn.Parameter(made, requires_grad=False)
        target.memo.twins[layer] = bits, made
        return made

    def _refuse(self, optimizer: torch.optim.Optimizer) -> None:
        raise SpeedKitError(
            f"{type(optimizer).__name__} would train a model whose weights {self.name} has "
            "rounded: ctx.restore() or `%speedkit restore` first, then make the optimizer"
        )

    def changes(self) -> dict[str, Any]:
        """Let the name alone mean the `bare` word."""
        return ({self.name: self.bare} if self.bare else {}) | super().changes()

    def facts_after(self, decision: Decision, facts: Facts) -> Facts:
        """Return the facts with its name: no other entry takes the same weights."""
        return replace(facts, quantized=self.name) if decision.active else facts

    def observe(self, target: Target) -> Mapping[str, Any]:
        """Return how many layers multiply so."""
        standing = [SWAPPED.standing(one).values() for one in target.model.modules()]
        own = {id(one.value) for each in standing for one in each if one.word == self.name}
        of = len(_linears(target.model))
        return {f"model.{self.name}": f"{len(own)} of {of} linear layers"}

    def expected(self, decision: Decision, target: Target, facts: Facts) -> Mapping[str, Any]:
        """Return how many layers have weights that fit."""
        number, of = len(self._layers(decision, target)), len(_linears(target.model))
        return {f"model.{self.name}": f"{number} of {of} linear layers"}


def by_torchao(config: Any, weight: torch.Tensor) -> torch.Tensor:
    """Return the weight as `torchao.quantization.quantize_` makes it, of a layer of its own."""
    import torch

    layer = torch.nn.Linear(1, 1, bias=False, device="meta")
    layer.weight = torch.nn.Parameter(weight.detach(), requires_grad=False)
    torchao().quantize_(layer, config)
    return layer.weight.detach()


def torchao(module: str = "quantization") -> Any:
    """Return a module of torchao's, without its remarks on kernels for other machines.

    Raises SpeedKitError where it can't be imported.
    """
    logging.getLogger("torchao").addFilter(_refuse_record)
    try:
        return import_module(f"torchao.{module}")
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise SpeedKitError(f"torchao can't be imported: {type(error).__name__}: {first}") from None
    finally:
        logging.getLogger("torchao").removeFilter(_refuse_record)


def _refuse_record(record: logging.LogRecord) -> bool:
    return False


def lacks_torchao(hardware: Hardware) -> str:
    """Why torchao is of no use in this environment; empty where it is."""
    installed = hardware.libraries.get("torchao")
    if installed is None:
        return "needs torchao: pip install torchao"
    if tuple(map(int, re.findall(r"\d+", installed)[:2])) < SINCE:
        return f"needs torchao {_dotted(SINCE)}; this is {installed}: pip install -U torchao"
    return ""


def for_good(decision: Decision) -> str:
    """Return the reason in generated code, which keeps no weights to come back."""
    return f"{decision.reason}; it takes the weights' place for good"


def true_is(word: str) -> BeforeValidator:
    """Return the validator by which `true`, as a shell may spell it, stands for this word."""
    return BeforeValidator(lambda value: word if value in (True, "true", "on", "yes") else value)


def _unfit(facts: Facts) -> str:
    """Why the linear layers of this model can't multiply by others; empty where they can."""
    if facts.quantized:
        return f"{facts.quantized} has taken the weights' place already"
    if not facts.linears:
        return "the model has no linear layer"
    if facts.compiled == "script":
        return "a TorchScript module multiplies by itself"
    if not {*DTYPES} & {*facts.dtypes}:
        return f"the weights are {', '.join(facts.dtypes)}: it rounds floating-point numbers"
    return ""


def _linears(model: torch.nn.Module) -> list[Any]:
    return list(filter(is_linear, model.modules()))


def own_weight(layer: torch.nn.Linear) -> torch.nn.Parameter:
    """Return the user's own weight, beneath what plans have put in its place."""
    original = SWAPPED.original(layer)
    found = layer.weight if original is MISSING else original["_parameters", "weight"]
    return cast("torch.nn.Parameter", found)


def _is_plain(layer: torch.nn.Linear, stepped: set[int]) -> bool:
    """Whether it multiplies by a weight of torch's own class that nothing steps or looks into."""
    import torch

    weight = own_weight(layer) if "weight" in layer._parameters else None
    if type(weight) is not torch.nn.Parameter or type(layer) is not torch.nn.Linear:
        return False
    known = str(weight.dtype).removeprefix("torch.") in DTYPES and not weight.is_meta
    return known and weight.numel() > 0 and id(weight) not in stepped and not is_watched(layer)


def _overrides(
    model: torch.nn.Module, made: Mapping[torch.nn.Module, StandIn]
) -> list[tuple[torch.nn.Module, dict[Slot, StandIn]]]:
    """Return for each module what stands in for its parts, or for its own weight."""
    import torch

    overrides = []
    for module in model.modules():
        override: dict[Slot, StandIn] = {
            ("_modules", name): made[child]
            for name, child in module._modules.items()
            if child is not None
            and child in made
            and isinstance(made[child].value, torch.nn.Module)
        }
        if module in made and isinstance(made[module].value, torch.Tensor):
            override["_parameters", "weight"] = made[module]
        if override:
            overrides.append((module, override))
    return overrides


def _checksum(weight: torch.Tensor) -> list[torch.Tensor]:
    """Return the sums of the bits of each row and of each column: writes raise no version."""
    import torch

    whole = {2: torch.int16, 4: torch.int32}[weight.element_size()]
    bits = weight.contiguous().view(whole)
    return [bits.sum(dimension, dtype=torch.int64) for dimension in (0, 1)]


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))

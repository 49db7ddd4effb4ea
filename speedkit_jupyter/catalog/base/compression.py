"""The base class of entries that multiply with fewer bits: torchao's weights replace the model's,
and the user's parameters come back unchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

import torch
from pydantic import BeforeValidator

from speedkit_jupyter.catalog.base.decision import Decision, Effect, Form, Request, Snippet, call
from speedkit_jupyter.catalog.base.optimization import Optimization, dotted, imported, lacks
from speedkit_jupyter.catalog.base.target import Target
from speedkit_jupyter.catalog.facts.model import Facts, is_linear
from speedkit_jupyter.catalog.properties.calls import is_watched
from speedkit_jupyter.catalog.properties.overrides import MISSING, SWAPPED, Slot, Slots, StandIn
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.torchglue.modules import MODULES, PARAMETERS, module_table, parameter_table
from speedkit_jupyter.torchglue.storage import are_changed, marks

DTYPES = ("float32", "bfloat16", "float16")
# The first torchao with right int8 products on CPUs whose 8-bit sums overflow.
SINCE = (0, 18)
INFERENCE = "no gradients go through these layers"
FOR_GOOD = "it takes the weights' place for good"
IMPORT = "from torchao.quantization import quantize_"
FUSED = "`compile` fuses the casts, without which it may be slower"


class Compression(Optimization):
    """By request only; one of them at a time."""

    effect = Effect.CHANGES_MODEL
    library = "torchao"
    page = "https://docs.pytorch.org/ao/stable/"
    undone = "the model's own weights are back, the same objects"
    for_training: ClassVar[bool] = False  # optimizers may step the weights
    multiples: ClassVar[tuple[int, int]] = (1, 1)  # that rows and columns must be of
    also: ClassVar[str] = ""  # a further condition on weights, in words
    casts: ClassVar[bool] = False  # to bfloat16 first
    hint: ClassVar[str] = INFERENCE
    since: ClassVar[tuple[int, int]] = (0, 0)  # the first compute capability with these `units`
    units: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        if word := cls.bare:  # the meaning of `true`, in any spelling of a shell
            spelled = (True, "true", "on", "yes")
            cls.Options = Annotated[
                cls.Options, BeforeValidator(lambda value: word if value in spelled else value)
            ]
        cls.refusal = "" if cls.for_training else f"a model whose weights {cls.name} has rounded"
        super().__init_subclass__()

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        """Accept a request where the device can do it and nothing trains the weights."""
        is_auto = request.value == "auto"
        why = "" if is_auto else self._obstacle(request.value, hardware, facts)
        rule = f"{facts.linears} linear layers"
        return request.on_request(why, "it changes the results: ask for it", rule, hint=self.hint)

    def _obstacle(self, value: Any, hardware: Hardware, facts: Facts) -> str:
        if facts.optimizers and not self.for_training:
            trained = ", ".join(optimizer.name for optimizer in facts.optimizers)
            return f"{trained} trains this model, and this is for inference: take a deepcopy of it"
        if facts.quantized:
            return f"{facts.quantized} has taken the weights' place already"
        if not facts.linears:
            return "the model has no linear layer"
        if facts.compiled == "script":
            return "a TorchScript module multiplies by itself"
        if not {*DTYPES} & {*facts.dtypes}:
            return f"the weights are {', '.join(facts.dtypes)}: it rounds floating-point numbers"
        missing = self.missing_units(value, hardware, facts)
        return missing or (lacks(hardware, self.library, SINCE) if self.library else "")

    def missing_units(self, value: Any, hardware: Hardware, facts: Facts) -> str:
        """Return the reason why this device can't multiply so; empty if it can."""
        gpu = hardware.accelerator(facts.device)
        has = f"this is {facts.device if gpu is None else gpu.name}"
        if gpu is not None and gpu.is_nvidia and gpu.capability is not None and gpu.tensor_cores:
            if gpu.capability >= self.since:
                return ""
            has = f"{gpu.name} has {dotted(gpu.capability)}"
        return f"{self.units} need compute capability {dotted(self.since)}; {has}"

    def config(self, value: Any, device: torch.device) -> tuple[str, str, dict[str, Any]]:
        """Return torchao's module, the name of its config, and the config's arguments."""
        raise NotImplementedError

    def made(self, value: Any, layer: torch.nn.Linear) -> Any:
        """Return a replacement: a tensor for the layer's weight, or a module for the layer."""
        weight = own_weight(layer).detach()
        module, name, arguments = self.config(value, weight.device)
        alone = torch.nn.Linear(1, 1, bias=False, device="meta")
        values = weight.bfloat16().contiguous() if self.casts else weight
        alone.weight = torch.nn.Parameter(values, requires_grad=False)
        torchao().quantize_(alone, getattr(torchao(module), name)(**arguments))
        return alone.weight.detach()

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        """Return torchao's own call, which replaces the weights for good."""
        module, name, arguments = self.config(decision.value, torch.device(facts.device_type))
        rows, columns = self.multiples
        sizes = f"not (module.out_features % {rows} or module.in_features % {columns})"
        model = (
            "for module in model.modules():",
            f"    if type(module) is torch.nn.Linear and {sizes}:",
            *["        module.weight.data = module.weight.data.bfloat16()"] * self.casts,
            f"        quantize_(module, {call(name, **arguments)})",
        )
        imports = f"from torchao.{module} import {name}", IMPORT
        return Snippet(f"{decision.reason}; {FOR_GOOD}", imports=imports, model=model)

    def stand_ins(self, decision: Decision, target: Target) -> Mapping[torch.nn.Module, Slots]:
        """Return replacements for all fitting layers that no optimizer steps."""
        layers: list[Any] = self._layers(decision.value, target)
        made: dict[Any, Any] = {one: self._made(decision.value, target, one) for one in layers}
        if not made:
            fit = "rows a multiple of {}, columns of {}".format(*self.multiples)
            target.notes[self.name] = f"no linear layer fits: {fit}{self.also}"
        found: dict[torch.nn.Module, dict[Slot, StandIn]] = {}
        for module in target.model.modules():
            own = {(MODULES, name): made.get(child) for name, child in module_table(module).items()}
            new = {slot: one for slot, one in own.items() if isinstance(one, torch.nn.Module)}
            if isinstance(made.get(module), torch.nn.Parameter):
                new[PARAMETERS, "weight"] = made[module]
            if new:
                found[module] = {slot: StandIn(one, self.name) for slot, one in new.items()}
        return found

    def fits(self, value: Any, weight: torch.Tensor) -> bool:
        """Return whether this weight can be replaced."""
        return not any(n % one for n, one in zip(weight.shape, self.multiples, strict=True))

    def _layers(self, value: Any, target: Target) -> list[Any]:
        trains, live = self.for_training, target.live_optimizers()
        groups = [group for one in live if not trains for group in one.param_groups]
        stepped = {id(p) for group in groups for p in group["params"]}
        model = target.model
        layers: list[Any] = [m for m in model.modules() if not (trains and m is model)]
        plain = [m for m in layers if is_linear(m) and _is_plain(m, stepped)]
        return [layer for layer in plain if self.fits(value, own_weight(layer))]

    def _made(self, value: Any, target: Target, layer: torch.nn.Linear) -> Any:
        """Return the replacement made earlier of the same bits, or a new one."""
        weights = [own_weight(layer)]
        before, known = target.memo.quantized.get(layer, (None, None))
        if before and not are_changed(weights, before):
            return known
        with torch.no_grad(), torch.inference_mode(False), torch.autocast("cpu", enabled=False):
            made = self.made(value, layer)
            if not isinstance(made, torch.nn.Module):
                made = torch.nn.Parameter(made, requires_grad=False)
        target.memo.quantized[layer] = marks(weights), made
        return made

    def facts_after(self, decision: Decision, facts: Facts) -> Facts:
        return replace(facts, quantized=self.name) if decision.active else facts

    def observe(self, target: Target, planned: Decision | None = None) -> Mapping[str, Any]:
        ours = {id(v) for v, word in SWAPPED.in_model(target.model) if word == self.name}
        number = len(self._layers(planned.value, target) if planned else ours)
        every = sum(map(is_linear, target.model.modules()))
        return {f"model.{self.name}": f"{number} of {every} linear layers"}


def torchao(module: str = "quantization") -> Any:
    """Import a module of torchao without its log messages. Raises SpeedKitError without it."""
    logger = logging.getLogger("torchao")
    before, logger.disabled = logger.disabled, True
    try:
        return imported(f"torchao.{module}")
    finally:
        logger.disabled = before


def own_weight(layer: torch.nn.Linear) -> torch.nn.Parameter:
    """Return the user's own weight, which plans may have replaced."""
    original = SWAPPED.original(layer)
    weight: Any = layer.weight if original is MISSING else original[PARAMETERS, "weight"]
    return weight  # type: ignore[no-any-return]


def _is_plain(layer: torch.nn.Linear, stepped: set[int]) -> bool:
    """Return whether layer and weight are of torch's own classes, not stepped, without hooks."""
    weight = own_weight(layer) if "weight" in parameter_table(layer) else None
    if type(weight) is not torch.nn.Parameter or type(layer) is not torch.nn.Linear:
        return False
    is_known = str(weight.dtype).endswith(DTYPES) and weight.numel() > 0 and not weight.is_meta
    return is_known and id(weight) not in stepped and not is_watched(layer)

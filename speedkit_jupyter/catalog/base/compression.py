"""What the entries share that multiply by fewer bits: other weights stand in for the model's own,
made by torchao, and the user's parameters come back as they were.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

import torch
from pydantic import BeforeValidator

from speedkit_jupyter.catalog.base.decision import Decision, Effect, Request
from speedkit_jupyter.catalog.base.optimization import Optimization, dotted, imported, lacks
from speedkit_jupyter.catalog.base.snippet import Form, Snippet, call
from speedkit_jupyter.catalog.base.target import Target
from speedkit_jupyter.catalog.facts.layers import is_linear
from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.catalog.properties.calls import is_watched
from speedkit_jupyter.catalog.properties.overrides import MISSING
from speedkit_jupyter.catalog.properties.swapped import SWAPPED, Slot, Slots, StandIn
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.torchglue.modules import MODULES, PARAMETERS, module_table, parameter_table
from speedkit_jupyter.torchglue.storage import are_changed, marks

DTYPES = ("float32", "bfloat16", "float16")
# The first torchao whose int8 products stay right on CPUs that would overflow.
SINCE = (0, 18)
INFERENCE = "no gradients go through these layers"
FOR_GOOD = "it takes the weights' place for good"
IMPORT = "from torchao.quantization import quantize_"
FUSED = "`compile` fuses the casts, without which it may be slower"


class Compression(Optimization):
    """By request only; one of them at a time.

    `for_training` says that optimizers may step. Rows and columns have to be `multiples` of these
    numbers (`also` says what else a weight needs); with `casts` it is made bfloat16 first.
    `since` is the first compute capability whose `units` multiply so.
    """

    effect = Effect.CHANGES_MODEL
    library = "torchao"
    page = "https://docs.pytorch.org/ao/stable/"
    undone = "the model's own weights are back, the same objects"
    for_training: ClassVar[bool] = False
    multiples: ClassVar[tuple[int, int]] = (1, 1)
    also: ClassVar[str] = ""
    casts: ClassVar[bool] = False
    hint: ClassVar[str] = INFERENCE
    since: ClassVar[tuple[int, int]] = (0, 0)
    units: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        if word := cls.bare:  # which `true` stands for, as a shell may spell it
            spelled = (True, "true", "on", "yes")
            cls.Options = Annotated[
                cls.Options, BeforeValidator(lambda value: word if value in spelled else value)
            ]
        cls.refusal = "" if cls.for_training else f"a model whose weights {cls.name} has rounded"
        super().__init_subclass__()

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        """Decide for it by request, where the device can and nothing trains the weights."""
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
        """Return why this device does not multiply so; empty where it does."""
        gpu = hardware.accelerator(facts.device)
        has = f"this is {facts.device if gpu is None else gpu.name}"
        if gpu is not None and gpu.is_nvidia and gpu.capability is not None and gpu.tensor_cores:
            if gpu.capability >= self.since:
                return ""
            has = f"{gpu.name} has {dotted(gpu.capability)}"
        return f"{self.units} need compute capability {dotted(self.since)}; {has}"

    def config(self, value: Any, device: torch.device) -> tuple[str, str, dict[str, Any]]:
        """Return torchao's module, the name of its config there, and the config's arguments."""
        raise NotImplementedError

    def made(self, value: Any, layer: torch.nn.Linear) -> Any:
        """Return what stands in for the layer's weight, a tensor, or for the layer, a module."""
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
        """Return what stands in for every layer that fits, but for those that optimizers step."""
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
        """Return whether this weight can be replaced by what is made of it."""
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
        """Return what was made of the same bits before the plan was hidden, or make it anew."""
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
    """Return a module of torchao's, without its remarks. Raises SpeedKitError without it."""
    logger = logging.getLogger("torchao")
    before, logger.disabled = logger.disabled, True
    try:
        return imported(f"torchao.{module}")
    finally:
        logger.disabled = before


def own_weight(layer: torch.nn.Linear) -> torch.nn.Parameter:
    """Return the user's own weight, beneath what plans have put in its place."""
    original = SWAPPED.original(layer)
    weight: Any = layer.weight if original is MISSING else original[PARAMETERS, "weight"]
    return weight  # type: ignore[no-any-return]


def _is_plain(layer: torch.nn.Linear, stepped: set[int]) -> bool:
    """Return whether its weight is of torch's own class, and nothing steps or watches it."""
    weight = own_weight(layer) if "weight" in parameter_table(layer) else None
    if type(weight) is not torch.nn.Parameter or type(layer) is not torch.nn.Linear:
        return False
    is_known = str(weight.dtype).endswith(DTYPES) and weight.numel() > 0 and not weight.is_meta
    return is_known and id(weight) not in stepped and not is_watched(layer)

"""The switches `int8`, `int4`, `float8`: quantized linear layers, by torchao."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BeforeValidator

from speedkit_jupyter.catalog.base.decision import Decision, Effect, Form, Request, Snippet, Switch
from speedkit_jupyter.catalog.base.optimization import Optimization, call, dotted
from speedkit_jupyter.catalog.base.target import Target
from speedkit_jupyter.catalog.facts.model import Facts, adapters_in, is_linear
from speedkit_jupyter.catalog.model_changes.calls import HOOKS, has_own_forward
from speedkit_jupyter.catalog.model_changes.overrides import MERGE, MISSING, SWAPPED, Slots, StandIn
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.support.exceptions import SpeedKitError, in_a_line
from speedkit_jupyter.torchglue import private as torch_private
from speedkit_jupyter.torchglue.modules import MODULES, PARAMETERS, module_table, parameter_table
from speedkit_jupyter.torchglue.storage import marks

DTYPES = ("float32", "bfloat16", "float16")
# The oldest accepted torchao: OLDEST for `int8: weights` and float8; SINCE for int4 and for dynamic
# int8, which needs `reduce_range` on CPUs whose 8-bit sums overflow.
OLDEST, SINCE = (0, 10), (0, 18)


class Quantization(Optimization):
    """The base class of switches that replace linear layers or weights with torchao's classes."""

    effect = Effect.CHANGES_MODEL
    before = "cuda_graphs"
    library = "torchao"
    page = "https://docs.pytorch.org/ao/stable/"
    for_training: ClassVar[bool] = False  # True if optimizers may step the weights
    multiples: ClassVar[tuple[int, int]] = (1, 1)  # required divisors of weights' rows and columns
    casts: ClassVar[bool] = False  # True if weights are cast to bfloat16 first
    hint: ClassVar[str] = "no gradients go through these layers"
    since: ClassVar[tuple[int, int]]  # the first compute capability with these `units`
    units: ClassVar[str]
    early: ClassVar[tuple[Any, ...]] = ()  # values for which version OLDEST of torchao is enough

    def __init_subclass__(cls) -> None:
        if word := cls.bare:  # `true`, `on` and `yes` mean the bare word
            spelled = (True, "true", "on", "yes")
            meant = BeforeValidator(lambda value: word if value in spelled else value)
            cls.Options = Annotated[cls.Options, meant]
        cls.refusal = "" if cls.for_training else f"a model whose weights {cls.name} has rounded"
        super().__init_subclass__()

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        why = "" if request.value == "auto" else self._obstacle(request.value, hardware, facts)
        otherwise, rule = "it changes results: on request only", f"{facts.linears} linear layers"
        return request.on_request(why, otherwise, rule, hint=self.hint)

    def _obstacle(self, value: Any, hardware: Hardware, facts: Facts) -> str:
        if facts.optimizers and not self.for_training:
            trained = ", ".join(optimizer.name for optimizer in facts.optimizers)
            return f"{trained} trains this model, but this is for inference: apply it to a deepcopy"
        if facts.quantized:
            return f"{facts.quantized} has replaced the weights already"
        if not facts.linears:
            return "the model has no linear layer"
        if facts.compiled == "script":
            return "a TorchScript module multiplies by itself"
        if not {*DTYPES} & {*facts.dtypes}:
            return f"the weights are {', '.join(facts.dtypes)}: it rounds floating-point numbers"
        missing = self.missing_units(value, hardware, facts)
        return missing or lacks(hardware, self.library, OLDEST if value in self.early else SINCE)

    def missing_units(self, value: Any, hardware: Hardware, facts: Facts) -> str:
        """Return which hardware units the device lacks for `value`; empty if it lacks none."""
        gpu = hardware.accelerator(facts.device)
        has = f"this is {facts.device if gpu is None else gpu.name}"
        if gpu is not None and gpu.is_nvidia and gpu.capability is not None and gpu.tensor_cores:
            if gpu.capability >= self.since:
                return ""
            has = f"{gpu.name} has {dotted(gpu.capability)}"
        return f"{self.units} need compute capability {dotted(self.since)}; {has}"

    def config(self, value: Any, device: torch.device) -> tuple[str, dict[str, Any]]:
        """Return the name and the keyword arguments of torchao's config class."""
        raise NotImplementedError

    def made(self, value: Any, layer: torch.nn.Linear) -> Any:
        """Return a layer's replacement: a parameter for its weight, or a module for the layer."""
        weight = own_weight(layer).detach()
        name, arguments = self.config(value, weight.device)
        alone = torch.nn.Linear(1, 1, bias=False, device="meta")
        values = weight.bfloat16().contiguous() if self.casts else weight
        alone.weight = torch.nn.Parameter(values, requires_grad=False)
        torchao().quantize_(alone, getattr(torchao(), name)(**arguments))
        return torch.nn.Parameter(alone.weight.detach(), requires_grad=False)

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        """Return source that calls torchao, which replaces the weights permanently."""
        name, arguments = self.config(decision.value, torch.device(facts.device_type))
        rows, columns = self.multiples
        sizes = f"not (module.out_features % {rows} or module.in_features % {columns})"
        if any(one.__module__.startswith("peft.") for one in facts.classes):
            sizes += ' and ".lora_" not in name'  # peft's adapters are not quantized
        model = (
            "for name, module in model.named_modules():",
            f"    if type(module) is torch.nn.Linear and {sizes}:",
            *["        module.weight.data = module.weight.data.bfloat16()"] * self.casts,
            f"        quantize_(module, {call(name, **arguments)})",
        )
        comment = f"{decision.reason}; the weights are replaced permanently"
        imports = (f"from torchao.quantization import {name}, quantize_",)
        return Snippet(comment, imports, model=model)

    def stand_ins(self, decision: Decision, target: Target) -> Mapping[torch.nn.Module, Slots]:
        """Return replacements by module, or MERGE for peft layers; add a note if no layer fits."""
        layers = self._layers(target)
        made: dict[Any, Any] = {one: self._made(decision.value, target, one) for one in layers}
        if not made:
            fit = "rows a multiple of {}, columns of {}".format(*self.multiples)
            target.notes[self.name] = f"no linear layer fits: {fit}"
        found: dict[torch.nn.Module, Slots] = {}
        for module in target.model.modules():
            own = {(MODULES, name): made.get(child) for name, child in module_table(module).items()}
            new = {slot: one for slot, one in own.items() if isinstance(one, torch.nn.Module)}
            if isinstance(made.get(module), torch.nn.Parameter):
                new[PARAMETERS, "weight"] = made[module]
            if new:
                found[module] = {slot: StandIn(one, self.name) for slot, one in new.items()}
            if isinstance(made.get(getattr(module, "base_layer", None)), torch.nn.Parameter):
                found[module] = MERGE
        return found

    def _layers(self, target: Target) -> list[Any]:
        trains, live, model = self.for_training, target.live_optimizers(), target.model
        groups = [group for one in live if not trains for group in one.param_groups]
        stepped = {id(p) for group in groups for p in group["params"]}
        left = adapters_in(model) | ({model} if trains else set())
        layers: list[Any] = [one for one in model.modules() if is_linear(one) and one not in left]
        rows, columns = self.multiples
        fit = (m for m in layers if not (m.out_features % rows or m.in_features % columns))
        return [layer for layer in fit if _is_plain(layer, stepped)]

    def _made(self, value: Any, target: Target, layer: torch.nn.Linear) -> Any:
        """Return the earlier replacement if the weight is unchanged, else a new replacement."""
        weights = [own_weight(layer)]
        before, known = target.memo.quantized.get(layer, (None, None))
        if before == marks(weights):
            return known
        with torch.no_grad(), torch.inference_mode(False), torch.autocast("cpu", enabled=False):
            made = self.made(value, layer)
        target.memo.quantized[layer] = marks(weights), made
        return made

    def facts_after(self, decision: Decision, facts: Facts) -> Facts:
        return replace(facts, quantized=self.name) if decision.active else facts

    def observe(self, target: Target, planned: Decision | None = None) -> Mapping[str, Any]:
        modules = list(target.model.modules())
        every = (one for module in modules for one in SWAPPED.current(module).values())
        now = {id(value) for value, word in every if word == self.name}
        number = len(self._layers(target) if planned else now)
        return {f"model.{self.name}": f"{number} of {sum(map(is_linear, modules))} linear layers"}


def torchao(module: str = "quantization") -> Any:
    """Import a module of torchao without its log messages; raise SpeedKitError if that fails."""
    logger = logging.getLogger("torchao")
    before, logger.disabled = logger.disabled, True
    try:
        return import_module(f"torchao.{module}")
    except Exception as error:
        raise SpeedKitError(f"torchao can't be imported: {in_a_line(error)}") from None
    finally:
        logger.disabled = before


def lacks(hardware: Hardware, library: str, since: tuple[int, int]) -> str:
    """Return why a library can't be used, or "" if version `since` or later is installed."""
    installed = hardware.libraries.get(library)
    if installed is None:
        return f"needs {library}: pip install {library}"
    if tuple(map(int, re.findall(r"\d+", installed)[:2])) < since:
        return f"needs {library} {dotted(since)}; this is {installed}: pip install -U {library}"
    return ""


def own_weight(layer: torch.nn.Linear) -> torch.nn.Parameter:
    """Return the user's original weight, even if a plan has replaced it."""
    original = SWAPPED.original(layer)
    weight: Any = layer.weight if original is MISSING else original[PARAMETERS, "weight"]
    return weight  # type: ignore[no-any-return]


def _is_plain(layer: torch.nn.Linear, stepped: set[int]) -> bool:
    """Return whether a layer is an unmodified Linear with a float weight not in `stepped`."""
    weight = own_weight(layer) if "weight" in parameter_table(layer) else None
    if type(weight) is not torch.nn.Parameter or type(layer) is not torch.nn.Linear:
        return False
    is_watched = any(getattr(layer, kind) for kind in HOOKS) or has_own_forward(layer)
    is_known = str(weight.dtype).endswith(DTYPES) and weight.numel() > 0 and not weight.is_meta
    return is_known and id(weight) not in stepped and not is_watched


# --- the switches ---


INT8 = {"dynamic": "Int8DynamicActivationInt8WeightConfig", "weights": "Int8WeightOnlyConfig"}


class Int8(Quantization):
    """Use 8-bit integers for inference: `weights` rounds weights; `dynamic` rounds inputs, too."""

    name = "int8"
    summary = "linear layers in 8-bit integers, by torchao"
    helps = "inference with large linear layers; `weights` for single rows"
    risk = "outputs change by about 1 %; small layers get slower"
    bare = "dynamic"
    since, units = (7, 5), "products of 8-bit integers (`int8: weights` does without them)"
    early = ("weights",)
    Options = Literal["auto", False, "dynamic", "weights"]

    def missing_units(self, value: Any, hardware: Hardware, facts: Facts) -> str:
        needs_none = value != "dynamic" or facts.device_type == "cpu"
        return "" if needs_none else super().missing_units(value, hardware, facts)

    def config(self, value: Any, device: torch.device) -> tuple[str, dict[str, Any]]:
        """Return the config's name and arguments; use 7 bits if sums of 8-bit products overflow."""
        arguments: dict[str, Any] = {"set_inductor_config": False}
        if value == "dynamic" and device.type == "cpu" and overflows():
            arguments["reduce_range"] = True
        return INT8[value], arguments


@cache
def overflows() -> bool:
    """Return whether sums of 8-bit products overflow: on CPUs without VNNI, they saturate."""
    most = torch.full((32, 64), 127, dtype=torch.int8)
    return bool((torch_private.int8_product(most, most.t()) != 127 * 127 * 64).any())


# Weights per scale in int4; torchao requires whole groups in each row.
GROUP = 128


class Int4(Quantization):
    """Use 4-bit weights for inference: 16 levels within each group's range, with bf16 inputs."""

    name = "int4"
    summary = "linear layers with 4-bit weights, by torchao"
    helps = "memory-bound inference: language models that generate one token at a time"
    risk = "outputs change by several percent; slower for large batches"
    multiples, casts = (1, GROUP), True
    since, units = (8, 0), "torch's kernels for 4 bits"
    Options = Switch

    def config(self, value: Any, device: torch.device) -> tuple[str, dict[str, Any]]:
        arguments: dict[str, Any] = {"group_size": GROUP, "set_inductor_config": False}
        return "Int4WeightOnlyConfig", arguments | {"int4_packing_format": "tile_packed_to_4d"}


FLOAT8 = """\
convert_to_float8_training(
    model,
    config=Float8LinearConfig(pad_inner_dim=True),
    module_filter_fn=lambda layer, name: type(layer) is torch.nn.Linear
    and layer.in_features % 16 == layer.out_features % 16 == 0,
)"""


class Float8(Quantization):
    """Use torchao's layers, which round weights, inputs and gradients to float8 in products."""

    name = "float8"
    summary = "linear layers in 8-bit floating point, by torchao"
    helps = "training and inference with large linear layers on Ada, Hopper and later, compiled"
    risk = "products of 3 to 4 significant bits: watch the loss; slower unless the casts are fused"
    for_training = True
    multiples = (16, 16)
    hint = "`compile` fuses the casts, without which it may be slower"
    since, units, early = (8, 9), "float8 Tensor Cores", (True,)
    Options = Switch

    def made(self, value: Any, layer: torch.nn.Linear) -> Any:
        config = torchao("float8").Float8LinearConfig(pad_inner_dim=True)
        new = torchao("float8.float8_linear").Float8Linear.from_float(layer, config=config)
        return new.train(layer.training)

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        imports = ("from torchao.float8 import Float8LinearConfig, convert_to_float8_training",)
        return Snippet(imports=imports, model=tuple(FLOAT8.splitlines()))

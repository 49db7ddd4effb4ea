"""Entries for the catalog, in the order of applying them: weights in bf16, and a static cache."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Annotated, Any

import torch
from pydantic import Field

from speedkit_jupyter.catalog.base.decision import Decision, Effect, Form, Request, Snippet, Switch
from speedkit_jupyter.catalog.base.optimization import Optimization
from speedkit_jupyter.catalog.base.target import Target
from speedkit_jupyter.catalog.compile import Compile, obstacle
from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.catalog.precision import in_float32
from speedkit_jupyter.catalog.properties.calls import Call
from speedkit_jupyter.catalog.properties.overrides import SWAPPED, Slots, StandIn
from speedkit_jupyter.extras.generation import generates, generating_parts, why_not_generating
from speedkit_jupyter.extras.generation.decoding import (
    DecodingCall,
    DecodingCode,
    with_static_cache,
)
from speedkit_jupyter.machines import flags
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.support.exceptions import SpeedKitError
from speedkit_jupyter.torchglue.modules import PARAMETERS, parameter_table
from speedkit_jupyter.torchglue.storage import marks

RULE = "each token reads all weights, and bf16 halves their bytes"
GENERATE, TOKENS = ("", "generate"), "input_ids"
CODE = """\
compiling = CompileConfig(mode="{mode}")
compiling._compile_all_devices = True  # without it, transformers compiles for GPUs only
for module in model.modules():
    if hasattr(module, "generation_config"):
        module.generation_config.cache_implementation = "static"
        module.generation_config.compile_config = compiling"""


class Bf16Weights(Optimization):
    """Replace the float32 weights of a model that generates by copies in bf16; results are float32.

    Later writes to the model's own weights count from the next `apply` on.
    """

    name = "bf16_weights"
    before = "channels_last"
    effect = Effect.ROUNDING
    lowers = True
    rounds_to = "bf16"
    supersedes = frozenset({"precision", "tf32", "inference"})
    summary = "weights in bf16 for generate(), as by model.to(torch.bfloat16)"
    helps = "transformers' generate(), which reads all weights for each token"
    risk = "weights and products have 8 bits, and the copies take half of the weights' memory"
    library = "transformers"
    page = "https://huggingface.co/docs/transformers/main/en/llm_optims"
    refusal = "a model whose weights bf16_weights has rounded"
    Options = Switch

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        why, has_units = _why_not_bf16(facts), _has_units(hardware, facts)
        if request.word == "auto" and not why and has_units:
            return request.offer(False, True, RULE)
        slow = "" if has_units else f"{facts.device} has no bf16 units, which is usually far slower"
        return request.on_request(why, slow, RULE, hint=slow)

    def candidates(self, hardware: Hardware, facts: Facts) -> tuple[Any, ...]:
        is_able = facts.decodes and _has_units(hardware, facts) and not _why_not_bf16(facts)
        return (True,) if is_able else ()

    def facts_after(self, decision: Decision, facts: Facts) -> Facts:
        return replace(facts, quantized=self.name) if decision.active else facts

    def stand_ins(self, decision: Decision, target: Target) -> Mapping[torch.nn.Module, Slots]:
        if not decision.value:
            return {}
        found: dict[torch.nn.Module, Slots] = {}
        for part in generating_parts(target.model):
            made = self._made(target, part)
            for module in part.modules():
                table = parameter_table(module).items()
                own = {n: made[id(p)] for n, p in table if p is not None and id(p) in made}
                put = {(PARAMETERS, n): StandIn(p, self.name) for n, p in own.items()}
                found |= {module: put} if put else {}
        return found

    def _made(self, target: Target, part: torch.nn.Module) -> Mapping[int, torch.nn.Parameter]:
        """Return the copies by the `id()` of the original; earlier ones if these are unchanged."""
        weights = [one for one in part.parameters() if one.dtype is torch.float32]
        before, known = target.memo.quantized.get(part, (None, {}))
        if before == (seen := ([*map(id, weights)], marks(weights))):
            return known  # type: ignore[no-any-return]
        with torch.no_grad(), torch.inference_mode(False):
            made = {id(p): torch.nn.Parameter(p.bfloat16(), requires_grad=False) for p in weights}
        target.memo.quantized[part] = seen, made
        return made

    def calls(self, decision: Decision, target: Target) -> list[Call]:
        parts = generating_parts(target.model) if decision.value else []
        return [Raised(part, target.notes, target.only_in) for part in parts]

    def observe(self, target: Target, planned: Decision | None = None) -> Mapping[str, Any]:
        parts = generating_parts(target.model)
        modules = (module for part in parts for module in part.modules())
        every = (one for module in modules for one in SWAPPED.current(module).values())
        is_on = any(one.word == self.name for one in every)
        return {f"model.{self.name}": bool(planned.value) if planned else is_on} if parts else {}

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        if form != "torch":
            raise SpeedKitError("Trainer trains, and bf16_weights does not: use --as torch")
        line = "model.to(torch.bfloat16)"
        return Snippet(f"{decision.reason}; the weights are replaced permanently", model=(line,))


class Raised(Call):
    """A call whose results in bf16 are returned in float32."""

    order = 1  # around compiled code

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return in_float32(self.below(*args, **kwargs), torch.bfloat16)


def _has_units(hardware: Hardware, facts: Facts) -> bool:
    gpu = hardware.accelerator(facts.device)
    return hardware.cpu.bf16 if gpu is None else gpu.bf16


def _why_not_bf16(facts: Facts) -> str:
    if why := why_not_generating(facts):
        return why
    inputs = {getattr(kind, "main_input_name", TOKENS) for kind in filter(generates, facts.classes)}
    if others := sorted(inputs - {TOKENS}):
        return f"its {', '.join(others)} would have to be bf16, too"
    if facts.precision != "fp32":
        return f"the plan has precision {facts.precision}: one of both"
    if facts.quantized:
        return f"{facts.quantized} has replaced the weights already"
    return "" if "float32" in facts.dtypes else f"the weights are {', '.join(facts.dtypes)}"


class StaticDecoding(Optimization):
    """Give `generate()` a cache of fixed length, and compile the call that decodes one token.

    The prompt runs uncompiled. A number is the least length of the cache.
    """

    name = "static_cache"
    before = "compile"
    effect = Effect.ROUNDING
    costly = True
    excludes = frozenset({"compile", "cuda_graphs", "precision"})
    supersedes = frozenset({"compile", "inference"})  # generate() is under no_grad()
    free = "LENGTH"
    summary = "generate() with a cache of fixed length, and compiled code for each token"
    helps = "transformers' generate(): many calls with one token each"
    risk = "seconds at the second token, and again for another batch size or a longer cache"
    library = "transformers"
    page = "https://huggingface.co/docs/transformers/main/en/kv_cache"
    Options = Annotated[
        Switch | Annotated[int, Field(strict=True, gt=1, le=2**24)],
        Field(description="auto, true, false, or the least length of the cache"),
    ]

    def decide(self, request: Request, hardware: Hardware, facts: Facts) -> Decision:
        offer = "seconds of compiling: it is there on request"
        hint = "compiles at the second token of the first generate()"
        return request.on_request(_why_not_static(hardware, facts), offer, hint=hint)

    def candidates(self, hardware: Hardware, facts: Facts) -> tuple[Any, ...]:
        return (True,) if facts.decodes and not _why_not_static(hardware, facts) else ()

    def values(self, decision: Decision, now: flags.Values) -> Mapping[str, Any]:
        return Compile().values(decision, now)  # compiled code is saved and loaded alike

    def switched(self, decision: Decision, target: Target) -> AbstractContextManager[None]:
        return Compile().switched(decision, target)

    def stand_ins(self, decision: Decision, target: Target) -> Mapping[torch.nn.Module, Slots]:
        if not decision.value:
            return {}
        function = with_static_cache(self._code(target), target, decision.value)
        put = {GENERATE: StandIn(function, self.name)}
        return dict.fromkeys(generating_parts(target.model), put)

    def calls(self, decision: Decision, target: Target) -> list[Call]:
        parts = generating_parts(target.model) if decision.value else []
        return [DecodingCall(part, self._code(target)) for part in parts]

    def _code(self, target: Target) -> DecodingCode:
        """Return the compiled code of the plan's context."""
        if target.memo.compiled_call is None:
            parts = generating_parts(target.model)
            on_gpu = any(part.device.type == "cuda" for part in parts)
            options = {"mode": "reduce-overhead"} if on_gpu else {}
            target.memo.compiled_call = DecodingCode(options, parts, target.notes, entry=self.name)
        return target.memo.compiled_call  # type: ignore[no-any-return]

    def observe(self, target: Target, planned: Decision | None = None) -> Mapping[str, Any]:
        parts = generating_parts(target.model)
        is_on = any(GENERATE in SWAPPED.current(part) for part in parts)
        return {f"model.{self.name}": bool(planned.value) if planned else is_on} if parts else {}

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        if form != "torch":
            raise SpeedKitError("Trainer does not generate with a static cache: use --as torch")
        mode = "reduce-overhead" if facts.device_type == "cuda" else "default"
        lines = CODE.format(mode=mode).splitlines()
        if decision.value is not True:
            lines.append(f"        module.generation_config.max_cache_len = {decision.value}")
        imports = ("from transformers import CompileConfig",)
        return Snippet(imports=imports, model=tuple(lines))


def _why_not_static(hardware: Hardware, facts: Facts) -> str:
    if why := why_not_generating(facts):
        return why
    if facts.compiled != "no":
        return "the model is compiled already"
    if not any(getattr(kind, "_can_compile_fullgraph", False) for kind in facts.classes):
        return "transformers can't compile this model with a static cache"
    if facts.precision != "fp32":
        return "autocast casts all weights for each token; bf16_weights casts them once"
    return obstacle(hardware, facts, Compile.default)


SWITCHES = [Bf16Weights(), StaticDecoding()]

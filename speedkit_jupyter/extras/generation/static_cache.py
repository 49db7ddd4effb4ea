"""A static cache for `generate()`, with compiled decoding."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Annotated, Any

import torch
from pydantic import Field

from speedkit_jupyter.catalog.base.decision import Decision, Effect, Form, Request, Snippet, Switch
from speedkit_jupyter.catalog.base.optimization import Optimization
from speedkit_jupyter.catalog.base.target import Target
from speedkit_jupyter.catalog.compile import Compile, obstacle
from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.catalog.properties.calls import Call
from speedkit_jupyter.catalog.properties.overrides import SWAPPED, Slots, StandIn
from speedkit_jupyter.extras.generation import generating_parts, why_not_generating
from speedkit_jupyter.extras.generation.decoding import (
    DecodingCall,
    DecodingCode,
    with_static_cache,
)
from speedkit_jupyter.machines import flags
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.support.exceptions import SpeedKitError

GENERATE, TOKENS = ("", "generate"), "input_ids"
CODE = """\
compiling = CompileConfig(mode="{mode}")
compiling._compile_all_devices = True  # without it, transformers compiles for GPUs only
for module in model.modules():
    if hasattr(module, "generation_config"):
        module.generation_config.cache_implementation = "static"
        module.generation_config.compile_config = compiling"""


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
        return "autocast casts all weights for each token"
    return obstacle(hardware, facts, Compile.default)

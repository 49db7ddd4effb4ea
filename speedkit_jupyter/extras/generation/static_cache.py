"""The switch `static_cache`: give `generate()` a cache of fixed length, and choose the length."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Annotated, Any

import torch
from pydantic import Field

from speedkit_jupyter.catalog.base.decision import Decision, Effect, Form, Request, Snippet, Switch
from speedkit_jupyter.catalog.base.optimization import Optimization
from speedkit_jupyter.catalog.base.target import Target
from speedkit_jupyter.catalog.compile import Compile, obstacle
from speedkit_jupyter.catalog.facts.model import Facts
from speedkit_jupyter.catalog.model_changes import overrides
from speedkit_jupyter.catalog.model_changes.calls import Call
from speedkit_jupyter.extras.generation import generating_parts, why_not_generating
from speedkit_jupyter.extras.generation.decoding import DecodingCall, DecodingCode
from speedkit_jupyter.machines import flags
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.support.exceptions import SpeedKitError

GENERATE = ("", "generate")
# transformers remembers the length of the longest static cache in this attribute of the model.
LONGEST = "_previous_max_cache_length"
TOO_LONG = "prompt and new tokens need {} positions, and the model has {}: generated as before"
# Arguments of `generate()` with the user's code, which runs between tokens.
CALLBACKS = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "streamer")
CODE = """\
compiling = CompileConfig(mode="{mode}")
compiling._compile_all_devices = True  # without it, transformers compiles for GPUs only
for module in model.modules():
    if hasattr(module, "generation_config"):
        module.generation_config.cache_implementation = "static"
        module.generation_config.compile_config = compiling"""


class StaticDecoding(Optimization):
    """Give `generate()` a cache of fixed length, and compile the call that decodes one token.

    The prompt runs uncompiled. A number as the value is the minimum length of the cache.
    """

    name = "static_cache"
    before = "compile"
    effect = Effect.ROUNDING
    costly = True
    excludes = frozenset({"compile", "cuda_graphs", "precision"})
    supersedes = frozenset({"compile", "inference"})  # generate() runs under no_grad()
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
        return Compile().values(decision, now)  # compile's settings, such as the cache on disk

    def switched(self, decision: Decision, target: Target) -> AbstractContextManager[None]:
        return Compile().switched(decision, target)

    def stand_ins(self, decision: Decision, target: Target) -> Mapping[Any, overrides.Slots]:
        if not decision.value:
            return {}
        function = with_static_cache(self._code(target), target, decision.value)
        put = {GENERATE: overrides.StandIn(function, self.name)}
        return dict.fromkeys(generating_parts(target.model), put)

    def calls(self, decision: Decision, target: Target) -> list[Call]:
        parts = generating_parts(target.model) if decision.value else []
        return [DecodingCall(part, self._code(target)) for part in parts]

    def _code(self, target: Target) -> DecodingCode:
        """Return the compiled code; the first call creates it."""
        if target.memo.compiled_call is None:
            parts = generating_parts(target.model)
            on_gpu = any(part.device.type == "cuda" for part in parts)
            options = {"mode": "reduce-overhead"} if on_gpu else {}
            target.memo.compiled_call = DecodingCode(options, parts, target.notes, entry=self.name)
        return target.memo.compiled_call  # type: ignore[no-any-return]

    def observe(self, target: Target, planned: Decision | None = None) -> Mapping[str, Any]:
        parts = generating_parts(target.model)
        is_on = any(GENERATE in overrides.SWAPPED.current(part) for part in parts)
        return {f"model.{self.name}": bool(planned.value) if planned else is_on} if parts else {}

    def code(self, decision: Decision, facts: Facts, form: Form) -> Snippet:
        if form != "torch":
            raise SpeedKitError("Trainer does not generate with a static cache: use --as torch")
        mode = "reduce-overhead" if facts.device_type == "cuda" else "default"
        lines = CODE.format(mode=mode).splitlines()
        if decision.value is not True:
            lines.append(f"        module.generation_config.max_cache_len = {decision.value}")
        lines.append("# Call model.generate(…) as before; it compiles at the second token.")
        return Snippet(imports=("from transformers import CompileConfig",), model=tuple(lines))


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


def with_static_cache(code: DecodingCode, target: Target, length: Any) -> Callable[..., Any]:
    """Return a replacement of `generate()` that uses a static cache where possible."""
    notes, only_in = target.notes, target.only_in  # `target` itself would keep the model alive

    def generate(module: Any, *args: Any, **kwargs: Any) -> Any:
        plain = type(module).generate
        is_here = only_in in (None, threading.get_ident())
        rows = rows_and_length(args, kwargs, module)
        if code.failed or not is_here or rows is None:
            return plain(module, *args, **kwargs)
        # A power of two, so that calls of similar lengths share compiled code.
        longest = 1 << (rows[1] - 1).bit_length()
        most = getattr(module.config, "max_position_embeddings", None) or longest
        cache = max(min(longest, most), rows[1], 0 if length is True else length)
        before = vars(module).get(LONGEST, overrides.MISSING)
        if rows[1] > most:  # may fail; the error is clearer without compiled code
            notes["static_cache"] = TOO_LONG.format(rows[1], most)
            return plain(module, *args, **kwargs)
        code.shapes.add((rows[0], cache))
        try:
            with code.decoding(not any(kwargs.get(name) for name in CALLBACKS)):
                return plain(module, *args, **_with_cache(kwargs, cache))
        finally:
            overrides.put_back_entries(vars(module), {LONGEST: before})
            if not code.failed:
                sizes = ", ".join(f"{rows} × {length}" for rows, length in sorted(code.shapes))
                more = "; torch compiles a second shape for all sizes" * (len(code.shapes) > 1)
                notes["static_cache"] = (
                    f"decoding is compiled for rows × length of the cache: {sizes}{more}"
                )

    return generate


def _with_cache(kwargs: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Return `kwargs` with a static cache of this length. A user's config is copied first."""
    wanted = {"cache_implementation": "static", "disable_compile": True, "max_cache_len": length}
    if (config := kwargs.get("generation_config")) is None:
        return {**kwargs, **wanted}
    config = copy.deepcopy(config)
    for name, value in wanted.items():
        setattr(config, name, value)
    return {**kwargs, "generation_config": config}


def rows_and_length(args: Any, kwargs: Mapping[str, Any], module: Any) -> tuple[int, int] | None:
    """Return the rows and positions that a call needs; None if it can't use a static cache.

    Excluded are beam search, assistants, prompt lookup, custom code, a second positional argument,
    the user's own cache, `use_cache=False`, inputs other than tensors, training mode, and autocast.
    Also excluded are returned caches, which must grow, and attentions, which need another kernel.
    """
    if module.training or torch.is_autocast_enabled(module.device.type):
        return None
    given = kwargs.get("generation_config")
    configs = [one for one in (given, module.generation_config) if one is not None]

    def asked(name: str) -> Any:
        values = [kwargs.get(name), *(getattr(config, name, None) for config in configs)]
        return next((value for value in values if value is not None), None)

    own = ("past_key_values", "assistant_model", "custom_generate", "cache_implementation")
    others = ("prompt_lookup_num_tokens", "return_dict_in_generate", "output_attentions")
    is_other = any(asked(name) for name in others) or (asked("num_beams") or 1) > 1
    named = (kwargs.get(name) for name in ("inputs", "input_ids", "input_features"))
    inputs = next((one for one in (*args, *named) if one is not None), None)
    is_plain = not (len(args) > 1 or is_other or any(asked(name) is not None for name in own))
    if not is_plain or asked("use_cache") is False or not isinstance(inputs, torch.Tensor):
        return None
    prompt = 1 if module.config.is_encoder_decoder else inputs.shape[-1]
    new = asked("max_new_tokens")
    most = prompt + new if new else asked("max_length") or prompt + 20  # transformers' default
    return len(inputs) * (asked("num_return_sequences") or 1), max(most, 2)

"""A `generate()` with a static cache, and the compiled call that decodes one token."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from speedkit_jupyter.catalog.base.target import Target
from speedkit_jupyter.catalog.properties.calls import Call
from speedkit_jupyter.catalog.properties.compiled import CompiledCode
from speedkit_jupyter.catalog.properties.overrides import MISSING, put_back_entries
from speedkit_jupyter.rounds.budget import graphs
from speedkit_jupyter.torchglue.dynamo import without_guards
from speedkit_jupyter.torchglue.modules import plain_call

# transformers remembers the longest cache in this attribute of the model.
LONGEST = "_previous_max_cache_length"
TOO_LONG = "prompt and new tokens need {} positions, and the model has {}: generated as before"
# Arguments of `generate()` with code of the user, which runs between tokens.
CALLBACKS = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "streamer")


class GenerationProgress(threading.local):
    """Whether this thread is in a `generate()`, and the cache of its current prompt.

    `is_alone` means without callbacks of the user. `checked` describes the arguments of the last
    call whose guards held.
    """

    is_on = is_alone = False
    cache: Any = None
    checked: Any = None


class DecodingCode(CompiledCode):
    """The compiled code for one token, and the progress of the current `generate()`."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.progress, self.shapes = GenerationProgress(), set[tuple[int, int]]()

    @contextmanager
    def decoding(self, is_alone: bool) -> Iterator[None]:
        progress = self.progress
        outer, progress.is_on, progress.is_alone = progress.is_on, True, is_alone
        try:
            yield
        finally:
            progress.is_on, progress.cache, progress.checked = outer, None, None


class DecodingCall(Call):
    """Calls of a model inside `generate()`: compiled for one token after the prompt."""

    def __init__(self, module: torch.nn.Module, code: DecodingCode) -> None:
        super().__init__(module)
        self._code = code

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return plain_call(self.module)(*args, **kwargs)
        progress, cache = self._code.progress, kwargs.get("past_key_values")
        tokens = kwargs.get("decoder_input_ids", kwargs.get("input_ids"))
        # The first call with a cache fills it; a prompt may have one token.
        is_prompt = cache is None or cache is not progress.cache
        if not progress.is_on or is_prompt or tokens is None or tokens.shape[-1] != 1:
            progress.cache, progress.checked = (cache if progress.is_on else None), None
            return self.below(*args, **kwargs)
        given = _described(kwargs) if progress.is_alone and not args else None
        if given is not None and given == progress.checked:
            # Guards of many layers take as long as the layers, and hold until the last token.
            try:
                with without_guards():
                    return self._code.run(self, args, kwargs)
            except RuntimeError as error:  # the model itself has changed; nothing has run yet
                if "skip_guard_eval_unsafe" not in str(error):
                    raise
        before = graphs()
        result = self._code.run(self, args, kwargs)
        progress.checked = given if graphs() == before else None
        return result


def _described(kwargs: Mapping[str, Any]) -> Any:
    """Return shapes of tensors and identities of other arguments; None for another cache.

    Compiled code may depend on Python counters in other kinds of cache layers.
    """
    cache = kwargs["past_key_values"]
    kinds = {type(cache).__name__, *(type(one).__name__ for one in getattr(cache, "layers", ()))}
    if kinds != {"StaticCache", "StaticLayer"}:
        return None
    return [
        (name, (one.shape, one.dtype) if isinstance(one, torch.Tensor) else id(one))
        for name, one in kwargs.items()
    ]


def with_static_cache(code: DecodingCode, target: Target, length: Any) -> Callable[..., Any]:
    """Return a method `generate` that adds the static cache; it keeps no model alive."""
    notes, only_in = target.notes, target.only_in

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
        before = vars(module).get(LONGEST, MISSING)
        if rows[1] > most:  # fails in most models, and without compiled code it fails cleanly
            notes["static_cache"] = TOO_LONG.format(rows[1], most)
            return plain(module, *args, **kwargs)
        code.shapes.add((rows[0], cache))
        try:
            with code.decoding(not any(kwargs.get(name) for name in CALLBACKS)):
                return plain(module, *args, **_with_cache(kwargs, cache))
        finally:
            put_back_entries(vars(module), {LONGEST: before})
            if not code.failed:
                notes["static_cache"] = _compiled_for(code.shapes)

    return generate


def _compiled_for(shapes: set[tuple[int, int]]) -> str:
    told = ", ".join(f"{rows} × {length}" for rows, length in sorted(shapes))
    more = "; torch compiles a second shape for all sizes" if len(shapes) > 1 else ""
    return f"decoding is compiled for rows × length of the cache: {told}{more}"


def _with_cache(kwargs: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Return the arguments of `generate()` with the cache; a given config is copied."""
    wanted = {"cache_implementation": "static", "disable_compile": True, "max_cache_len": length}
    if (config := kwargs.get("generation_config")) is None:
        return {**kwargs, **wanted}
    config = copy.deepcopy(config)
    for name, value in wanted.items():
        setattr(config, name, value)
    return {**kwargs, "generation_config": config}


def rows_and_length(args: Any, kwargs: Mapping[str, Any], module: Any) -> tuple[int, int] | None:
    """Return the rows of the batch and the needed length; None if the call has its own cache.

    So have beams, assistants and a generation config that is passed by position. A returned cache
    must be able to grow; attentions come from another kernel; dropout and the user's own autocast
    act otherwise in compiled code.
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

"""Run compiled code for each token that `generate()` decodes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from speedkit_jupyter.catalog.model_changes.calls import Call
from speedkit_jupyter.catalog.model_changes.compiled import CompiledCode
from speedkit_jupyter.rounds.budget import graphs
from speedkit_jupyter.torchglue.dynamo import without_guards
from speedkit_jupyter.torchglue.modules import plain_call


class GenerationProgress(threading.local):
    """The progress of `generate()` in each thread.

    `is_on` is true inside `generate()`. `is_alone` is true if no user callback runs between tokens.
    `checked` describes the arguments of the last call that passed the guards, or is None.
    """

    is_on = is_alone = False
    cache: Any = None  # the current prompt's cache
    checked: Any = None


class DecodingCode(CompiledCode):
    """The compiled code that decodes one token. `shapes` has pairs of rows and cache length."""

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
    """A wrapper that runs compiled code for one-token calls after the prompt, in `generate()`."""

    def __init__(self, module: torch.nn.Module, code: DecodingCode) -> None:
        super().__init__(module)
        self._code = code

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return plain_call(self.module)(*args, **kwargs)
        progress, cache = self._code.progress, kwargs.get("past_key_values")
        tokens = kwargs.get("decoder_input_ids", kwargs.get("input_ids"))
        # The first call with a given cache processes the prompt, which may be a single token.
        is_prompt = cache is None or cache is not progress.cache
        if not progress.is_on or is_prompt or tokens is None or tokens.shape[-1] != 1:
            progress.cache, progress.checked = (cache if progress.is_on else None), None
            return self.below(*args, **kwargs)
        given = _described(kwargs) if progress.is_alone and not args else None
        if given is not None and given == progress.checked:
            # Checking guards may take as long as the layers. Equal arguments would pass again.
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
    """Return a description of arguments: shape and dtype of tensors, `id()` of other objects.

    Return None unless the cache is a StaticCache: other caches may count tokens in Python.
    """
    cache = kwargs["past_key_values"]
    kinds = {type(cache).__name__, *(type(one).__name__ for one in getattr(cache, "layers", ()))}
    if kinds != {"StaticCache", "StaticLayer"}:
        return None
    return [
        (name, (one.shape, one.dtype) if isinstance(one, torch.Tensor) else id(one))
        for name, one in kwargs.items()
    ]

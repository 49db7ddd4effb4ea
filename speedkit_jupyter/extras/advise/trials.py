"""Remedies as contexts, so that they can be measured without editing any code.

Each function returns a context manager, which is made anew for every block.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from speedkit_jupyter.extras.advise.advice import Remedy, Subject
from speedkit_jupyter.extras.data.loader_settings import LoaderSettings, begun_with, rebuilt
from speedkit_jupyter.extras.kernels.attention import attention
from speedkit_jupyter.extras.kernels.patterns import Recognized
from speedkit_jupyter.torchglue.confinement import patched

Context = AbstractContextManager[Any]


def not_stepped(subject: Subject) -> list[torch.nn.Parameter]:
    """Return the parameters that require gradients, and that no optimizer holds."""
    held = subject.held
    return [one for one in subject.parameters if one.requires_grad and id(one) not in held]


@contextmanager
def _all_set(things: Sequence[Any], name: str, value: bool) -> Iterator[None]:
    """Set an attribute of all things for the block; all of them have the opposite value before."""
    try:
        for one in things:
            setattr(one, name, value)
        yield
    finally:
        for one in things:
            setattr(one, name, not value)


def without_gradients(subject: Subject) -> Context:
    """Require no gradients of parameters that no optimizer steps."""
    return _all_set(not_stepped(subject), "requires_grad", False)


def sparse_tables(subject: Subject) -> Context:
    """Have embeddings give gradients of the requested rows alone."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    tables = [one for model in subject.models for one in model.modules() if isinstance(one, kinds)]
    return _all_set([one for one in tables if not one.sparse], "sparse", True)


def no_gradients(_: Subject) -> Context:
    """Compute without gradients."""
    return torch.no_grad()


def graph_released(_: Subject) -> Context:
    """Call `backward` without `retain_graph` and `create_graph`."""

    def call(original: Any, tensors: Any, grads: Any = None, retain_graph: Any = None,
             create_graph: Any = False, *args: Any, **kwargs: Any) -> Any:  # fmt: skip
        return original(tensors, grads, None, False, *args, **kwargs)

    return patched(torch.autograd, "backward", partial(partial, call))


@contextmanager
def anomaly_mode_off(_: Subject) -> Iterator[None]:
    """Detect no anomalies, also where the step itself turns detection on."""
    make = lambda original: lambda mode, check_nan=True: original(False, check_nan)  # noqa: E731
    with torch.autograd.set_detect_anomaly(False), patched(torch, "set_anomaly_enabled", make):
        yield


def by_pattern(mask: torch.Tensor, found: Recognized) -> Remedy:
    """Return a remedy in which SDPA computes the pattern in place of a mask with these values."""

    def call(original: Any, q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0,
             is_causal: bool = False, **kwargs: Any) -> Any:  # fmt: skip
        if attn_mask is None or attn_mask.shape != mask.shape or not torch.equal(attn_mask, mask):
            return original(q, k, v, attn_mask, dropout_p, is_causal, **kwargs)
        if found.is_plain:
            return original(q, k, v, None, dropout_p, found.words == "causal", **kwargs)
        return attention(q, k, v, found.words, scale=kwargs.get("scale"), **found.options)

    make = partial(partial, call)
    return lambda _: patched(functional, "scaled_dot_product_attention", make)


@contextmanager
def nothing_collected(_: Subject) -> Iterator[None]:
    """Return at once from `gc.collect` and `empty_cache`."""
    nothing = lambda original: lambda *args, **kwargs: None  # noqa: E731
    with patched(gc, "collect", nothing), patched(torch.cuda, "empty_cache", nothing):
        yield


def other_loader(lasting: int | None, number: int, settings: LoaderSettings) -> Remedy | None:
    """Return a remedy in which the loader of this number loads with other settings.

    None for a loader that the step makes itself, anew in each call: only the first `lasting` stay.
    """

    def replaced(subject: Subject) -> Context:
        loader = subject.loaders[number]
        return begun_with(loader, partial(iter, rebuilt(loader, settings)))

    return replaced if lasting is None or number < lasting else None

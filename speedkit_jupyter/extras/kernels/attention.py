"""Attention with a pattern, which computes few scores that the pattern masks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cache, partial
from operator import truediv
from statistics import median
from typing import Any, NamedTuple

import torch

from speedkit_jupyter.extras.kernels import engines, patterns
from speedkit_jupyter.extras.kernels.engines import AttentionInputs, BlockLayout, Shape, laid_out
from speedkit_jupyter.extras.kernels.patterns import Pattern
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.budget import Budget
from speedkit_jupyter.rounds.shuffled_rounds import ShuffledRounds
from speedkit_jupyter.state.snapshot import generators_kept
from speedkit_jupyter.support import messages
from speedkit_jupyter.support.exceptions import ArgumentError, did_you_mean, in_a_line
from speedkit_jupyter.support.tracebacks import hide_internal_frames
from speedkit_jupyter.torchglue.dynamo import is_compiler_error
from speedkit_jupyter.torchglue.private import is_transforming

ENGINES = ("auto", "dense", "chunks", "flex")
# Block sizes: the smallest that gives each thread this many blocks. Fewer than two are one block.
SIZES, THREAD_QUERIES = (64, 128, 256), 64
# On a CPU, blocks are faster than torch's causal attention up to this length.
CAUSAL_QUERIES = 1024
# If blocks would compute more than this share of all scores, one call for all is faster.
DENSE = 0.85
# Devices with compiled FlexAttention, from this length on: its blocks have 128 queries.
FLEX_DEVICES, FLEX_QUERIES = ("cuda", "xpu"), 128
# Number of cached patterns, and of cached mask shapes for each pattern.
KEPT = 16
# Seconds of a measurement, its fewest and most rounds, and the largest relative time of a choice
# that replaces the rule's choice.
TUNE_S, ROUNDS, BETTER = 2.0, (3, 40), 0.97
# Cached masks by the key of the values that they depend on, the newest last.
_MASKS: OrderedDict[object, dict[Any, Any]] = OrderedDict()
_KNOWN: dict[object, PatternChoices] = {}


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: str = "full",
    *,
    window: int | tuple[int, int] | None = None,
    prefix: int | torch.Tensor | None = None,
    documents: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    cap: float | None = None,
    mask_mod: patterns.MaskMod | None = None,
    score_mod: patterns.ScoreMod | None = None,
    scale: float | None = None,
    engine: str = "auto",
    tune: bool = False,
) -> torch.Tensor:
    """Return softmax(q @ k.mT * scale) @ v over the keys that the pattern lets each query see.

    Query i and key i are at the same position. The result of a query that sees no key is zeros. A
    mask is cached until a value that it depends on changes. torch.compile does not compile this
    function.

    Args:
        q: queries, (batch, heads, queries, head_dim).
        k: keys, (batch, key_heads, keys, head_dim), where key_heads divides heads.
        v: values, (batch, key_heads, keys, value_dim).
        pattern: full, causal, sliding_window, prefix, documents, alibi or softcap, joined by + as
            in "causal+documents".
        window: for sliding_window, the number of keys up to the query's own; or (left, right).
        prefix: for prefix, the number of first keys that all see; also one for each row.
        documents: for documents, integers of shape (length,) or (batch, length): the document of
            each position. Positions see their own document only; a negative number is padding.
        slopes: for alibi, (heads,): a score decreases by its head's slope times the distance
            (default: the slopes of the paper).
        cap: for softcap: each score becomes cap · tanh(score / cap).
        mask_mod: a further mask, `mask_mod(batch, head, query, key)` as in FlexAttention; its
            indices are tensors that broadcast.
        score_mod: a further change of scores, `score_mod(score, batch, head, query, key)`.
        scale: factor of the scores (default: 1/√head_dim).
        engine: "dense" (one call of torch's SDPA), "chunks" (blocks of queries with the keys that
            they see), "flex" (FlexAttention, compiled; on a CPU without gradients only), or "auto",
            which chooses by a rule: flex on GPUs.
        tune: measure the engines at the first call with a shape, and use the fastest from then on.

    Returns:
        A tensor of shape (batch, heads, queries, value_dim).

    Raises:
        ArgumentError: shapes or options do not fit.

    Example::

        out = attention(q, k, v, "sliding_window", window=256)  # (batch, heads, length, head_dim)
    """
    __tracebackhide__ = True
    call = partial(
        _attention, AttentionInputs(q, k, v, scale), pattern, engine, tune, window=window,
        prefix=prefix, documents=documents, slopes=slopes, cap=cap,
        mask_mod=mask_mod, score_mod=score_mod,
    )  # fmt: skip
    return torch.compiler.disable(call)() if torch.compiler.is_compiling() else call()


@hide_internal_frames
def _attention(
    inputs: AttentionInputs, words: str, engine: str, tune: bool, **options: Any
) -> torch.Tensor:
    shape = _checked(inputs, options["documents"], engine)
    device = shape.device.type
    has_autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    if has_autocast and shape.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        inputs = AttentionInputs._make([*(one.to(dtype) for one in inputs[:3]), inputs.scale])
    options["device"] = shape.device
    if "alibi" in words and options["slopes"] is None:
        options["slopes"] = torch.tensor(patterns.slopes_of(shape.heads))
    tensors = {name: one for name, one in options.items() if isinstance(one, torch.Tensor)}
    is_plain = not is_transforming() and all(map(_is_plain, (*inputs[:3], *tensors.values())))
    key = _key(words, options) if is_plain else None
    masks = _MASKS.get(key, {})
    here = options | {name: one.to(shape.device) for name, one in tensors.items()}
    pattern = patterns.composed(patterns.names_in(words, here), here)
    if not is_plain:
        return engines.at_once(inputs, pattern)
    if key is not None:
        _MASKS[key] = masks
        _MASKS.move_to_end(key)
        if len(_MASKS) > KEPT:
            _MASKS.popitem(last=False)
    prepared = Prepared(pattern, masks, _known(words, options))
    if engine != "auto":
        return prepared.run(inputs, EngineChoice(engine, SIZES[0]))
    return prepared.run_best(inputs, tune)


def _checked(inputs: AttentionInputs, documents: Any, engine: str) -> Shape:
    sizes = [tuple(getattr(one, "shape", ())) for one in inputs[:3]]
    if [len(one) for one in sizes] != [4, 4, 4]:
        shown = ", ".join(map(str, sizes))
        raise ArgumentError(f"q, k and v must be (batch, heads, length, head_dim), not {shown}")
    (batch, heads, queries, width), key, value = sizes
    if key[0] != batch or key[3] != width or value[:3] != key[:3] or heads % max(key[1], 1):
        raise ArgumentError(f"q {sizes[0]}, k {key} and v {value} do not fit together")
    n, size = max(queries, key[2]), tuple(getattr(documents, "shape", ()))
    if documents is not None and size not in ((n,), (batch, n)):
        raise ArgumentError(f"documents must be ({n},) or ({batch}, {n}), not {size}")
    if engine not in ENGINES:
        near = did_you_mean(engine, ENGINES)
        raise ArgumentError(f"engine must be one of {', '.join(ENGINES)}, not {engine!r}.{near}")
    return inputs.shape


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's values can be read and similar tensors created."""
    is_known = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return is_known and not tensor.is_meta and tensor.numel() > 0


def _key(words: str, options: Mapping[str, Any]) -> object:
    """Return the key of a pattern's masks, or None if changes can't be detected."""
    # Without the values of options that only change scores.
    read = {**options, "cap": None, "score_mod": options["score_mod"] is None}
    if options["slopes"] is not None and options["slopes"].requires_grad:
        read["slopes"] = None
    return patterns.key_of([words, torch.get_default_dtype(), *read.values()])


def _known(words: str, options: Mapping[str, Any]) -> PatternChoices:
    alike = words, *(
        tuple(one.shape) if isinstance(one, torch.Tensor)
        else getattr(one, "__code__", type(one) if callable(one) else str(one))
        for one in options.values()
    )  # fmt: skip
    return _KNOWN.setdefault(alike, PatternChoices())


def forget_masks() -> str:
    """Release the masks that are kept for later calls; return a description of them."""
    found = "masks of attention()" if _MASKS else ""
    _MASKS.clear()
    return found


# --- the engine: by a rule, or by measuring ---


class EngineChoice(NamedTuple):
    """An engine of attention; `size` is the number of queries in a block."""

    engine: str
    size: int = 0


FLEX = EngineChoice("flex")


class PatternChoices:
    """The fastest engines, and compiled FlexAttention, of patterns that differ in values alone."""

    def __init__(self) -> None:
        self.can_flex = True
        self.choices: dict[object, EngineChoice] = {}
        self.flex = cache(engines.compiled_flex)


class Prepared:
    """A pattern with its `masks` by shape, and the `known` fastest engines."""

    def __init__(self, pattern: Pattern, masks: dict[Any, Any], known: PatternChoices) -> None:
        self.pattern, self.masks, self.known = pattern, masks, known

    def layout(self, shape: Shape, size: int) -> BlockLayout:
        return self._made(laid_out, shape, size)  # type: ignore[no-any-return]

    def _made(self, make: Callable[..., Any], *args: Any) -> Any:
        made = self.masks.get((make, args))
        if made is None:
            # Outside of inference mode, because later calls with gradients may use the masks.
            with torch.inference_mode(False), torch.no_grad():
                made = self.masks[make, args] = make(self.pattern, *args)
            if len(self.masks) > KEPT:
                self.masks.pop(next(iter(self.masks)), None)
        return made

    def run(self, inputs: AttentionInputs, choice: EngineChoice) -> torch.Tensor:
        shape, pattern = inputs.shape, self.pattern
        if choice.engine == "flex":
            device = shape.device
            flex = self.known.flex(device, shape if device.type == "cpu" else None)
            blocks = self._made(engines.block_mask, shape)
            return engines.by_flex(inputs, pattern, flex, blocks)
        if choice.engine == "dense" and pattern.is_plain:
            return engines.fused(inputs, is_causal=pattern.is_causal)
        size = choice.size if choice.engine == "chunks" else shape.queries
        return engines.by_blocks(inputs, pattern, self.layout(shape, size))

    def run_best(self, inputs: AttentionInputs, tune: bool) -> torch.Tensor:
        """Return attention by the fastest measured engine, or by the rule's engine."""
        known, shape = self.known, inputs.shape
        asked = shape, inputs.is_learned, torch.is_grad_enabled()
        if tune and asked not in known.choices:
            known.choices[asked] = self.measured(inputs)
        choice = known.choices.get(asked)
        if choice is None or (choice == FLEX and not known.can_flex):
            choice = self.by_rule(shape)
        try:
            return self.run(inputs, choice)
        except Exception as error:
            is_known = is_compiler_error(error) or isinstance(error, NotImplementedError)
            if choice != FLEX or not is_known:
                raise
            known.can_flex = False
            messages.warn(f"FlexAttention can't compute this here: {in_a_line(error)}")
        return self.run(inputs, self.by_rule(shape))

    def by_rule(self, shape: Shape) -> EngineChoice:
        """Return the engine that was fastest in most measurements of this kind."""
        pattern, kind = self.pattern, shape.device.type
        is_short = kind == "cpu" and pattern.mask is not None and shape.queries <= CAUSAL_QUERIES
        if pattern.is_plain and not is_short:
            return EngineChoice("dense")
        if kind in FLEX_DEVICES and self.known.can_flex:
            return FLEX if shape.queries >= FLEX_QUERIES else EngineChoice("dense")
        queries = THREAD_QUERIES * torch.get_num_threads() / (shape.batch * shape.heads)
        size = next((size for size in SIZES if size >= queries), SIZES[-1])
        if shape.queries < 2 * size or self.layout(shape, size).share > DENSE:
            return EngineChoice("dense")
        return EngineChoice("chunks", size)

    @generators_kept()
    def measured(self, inputs: AttentionInputs) -> EngineChoice:
        """Return the fastest engine, timed with the backward pass if one may follow."""
        shape, tracks = inputs.shape, inputs.is_learned
        qkv = [one.detach().requires_grad_(tracks and one.requires_grad) for one in inputs[:3]]
        rule, alone = self.by_rule(shape), AttentionInputs._make([*qkv, inputs.scale])
        learned = [one for one in qkv if one.requires_grad]
        chunks = [EngineChoice("chunks", size) for size in SIZES if size < shape.queries]
        can_flex = shape.device.type in FLEX_DEVICES or not torch.is_grad_enabled()
        every = [rule, EngineChoice("dense"), *chunks, *[FLEX] * can_flex]

        def call(choice: EngineChoice) -> None:
            found = self.run(alone, choice)
            if learned:
                torch.autograd.grad(found.sum(), learned)

        times: dict[EngineChoice, list[float]] = {}
        for choice in dict.fromkeys(every):
            try:
                call(choice)  # the first call builds masks and compiles
                times[choice] = []
            except Exception as error:
                messages.debug(f"{choice} is out: {in_a_line(error)}")
        budget, (least, most) = Budget(TUNE_S), ROUNDS
        left_s = lambda: budget.left_s  # noqa: E731
        for order in ShuffledRounds(lambda: [*times], left_s, least=least, most=most):
            for choice in order:
                times[choice].append(clock.timed(partial(call, choice), shape.device))
        return fastest(times, rule)


def fastest(times: Mapping[EngineChoice, list[float]], rule: EngineChoice) -> EngineChoice:
    """Return the fastest choice by ratios within rounds, if clearly faster than the rule's."""
    plain = times.get(rule) or next(iter(times.values()))
    ratios = {choice: median(map(truediv, found, plain)) for choice, found in times.items()}
    best = min(ratios, key=ratios.__getitem__)
    return best if ratios[best] < BETTER or rule not in times else rule

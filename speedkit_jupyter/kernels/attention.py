"""Attention by a pattern: computes the scores that the pattern lets through, and few others."""

from __future__ import annotations

import functools
import random
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from operator import truediv
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from speedkit_jupyter.kernels import engines
from speedkit_jupyter.kernels.blocks import Inputs, Shape, laid_out
from speedkit_jupyter.kernels.patterns import MaskMod, Pattern, ScoreMod, composed, names_in
from speedkit_jupyter.measure.rounds import clock
from speedkit_jupyter.support import messages
from speedkit_jupyter.support.exceptions import ArgumentError, did_you_mean, in_a_line
from speedkit_jupyter.support.torch_private import is_compiler_error, version
from speedkit_jupyter.support.tracebacks import hide_internal_frames

if TYPE_CHECKING:
    import torch

ENGINES = ("auto", "dense", "chunks", "flex")
# Queries in a block: the smallest that gives each thread this many. Fewer than two are one block.
SIZES, THREAD_QUERIES = (64, 128, 256), 64
# On a CPU blocks are faster than torch's own causal attention up to this length.
CAUSAL_QUERIES = 1024
# Where blocks compute more than this share of all scores, one call for all is faster.
DENSE = 0.85
# FlexAttention is compiled on these from this length on: its blocks have 128 queries.
FLEX_DEVICES, FLEX_QUERIES = ("cuda", "xpu"), 128
# Seconds and rounds of a measurement, and how much faster than the rule's choice another must be.
TUNE_S, ROUNDS, BETTER = 2.0, (7, 40), 0.97
# On a CPU without gradients one compiled kernel may be 1.6 times as fast as the rule's blocks, and
# takes this long to compile and measure: a shape that has taken as long is measured. So are as many
# shapes of a pattern, not each of those that change from call to call.
MEASURE_AFTER_S, MEASURED_SHAPES = 7.0, 4
# This many patterns are kept with their masks, those used last.
KEPT = 16


class Choice(NamedTuple):
    """How attention is computed; `size` is that of a block of queries."""

    engine: str
    size: int = 0


class Prepared:
    """A pattern, with the masks of the shapes that were asked for."""

    def __init__(self, pattern: Pattern, options: Mapping[str, Any]) -> None:
        self.pattern, self.can_flex = pattern, True
        self.options = options  # the key has the ids of these
        self.layout = lru_cache(8)(partial(_built, laid_out, pattern))
        self._block_mask = lru_cache(8)(partial(_built, engines.block_mask, pattern))
        self._flex = lru_cache(1)(engines.compiled_flex)
        self._spent_s: dict[Shape, float] = {}  # on a CPU without gradients, by the rule

    def run(self, inputs: Inputs, choice: Choice) -> torch.Tensor:
        """Return attention, computed as it was chosen."""
        shape, pattern = inputs.shape, self.pattern
        if choice.engine == "flex":
            flex, blocks = self._flex(shape.device), self._block_mask(shape)
            return engines.by_flex(inputs, pattern, flex, blocks)
        if choice.engine == "dense" and pattern.is_plain:
            return engines.fused(inputs, is_causal=pattern.is_causal)
        size = choice.size if choice.engine == "chunks" else shape.queries
        return engines.by_blocks(inputs, pattern, self.layout(shape, size))

    def pays(self, shape: Shape) -> bool:
        """Return whether this shape has taken as long as it takes to measure it."""
        return self._spent_s.get(shape, 0.0) >= MEASURE_AFTER_S

    def run_by_rule(self, inputs: Inputs) -> torch.Tensor:
        """Return attention by the rule, and note how long it took where measuring may pay."""
        import torch

        shape, begun_s = inputs.shape, clock.now()
        found = self.run(inputs, self.by_rule(shape))
        may_pay = shape.device.type == "cpu" and not torch.is_grad_enabled()
        if may_pay and (shape in self._spent_s or len(self._spent_s) < MEASURED_SHAPES):
            self._spent_s[shape] = self._spent_s.get(shape, 0.0) + clock.now() - begun_s
        return found

    def by_rule(self, shape: Shape) -> Choice:
        """Return what is fastest for most."""
        import torch

        pattern, kind = self.pattern, shape.device.type
        is_short = kind == "cpu" and pattern.mask is not None and shape.queries <= CAUSAL_QUERIES
        if pattern.is_plain and not is_short:
            return Choice("dense")
        if kind in FLEX_DEVICES and self.can_flex:
            return Choice("flex" if shape.queries >= FLEX_QUERIES else "dense")
        queries = THREAD_QUERIES * torch.get_num_threads() / (shape.batch * shape.heads)
        size = next((size for size in SIZES if size >= queries), SIZES[-1])
        if shape.queries < 2 * size or self.layout(shape, size).share > DENSE:
            return Choice("dense")
        return Choice("chunks", size)

    def measured(self, inputs: Inputs) -> Choice:
        """Return the fastest, with the backward pass where one may follow."""
        import torch

        shape, tracks = inputs.shape, inputs.is_learned
        q, k, v = (one.detach().requires_grad_(tracks and one.requires_grad) for one in inputs[:3])
        rule, alone = self.by_rule(shape), inputs._replace(q=q, k=k, v=v)
        learned = [one for one in (q, k, v) if one.requires_grad]
        every = [rule, Choice("dense"), *(Choice("chunks", s) for s in SIZES if s < shape.queries)]
        if shape.device.type in FLEX_DEVICES or not tracks:
            every.append(Choice("flex"))

        def call(choice: Choice) -> None:
            found = self.run(alone, choice)
            if learned:
                torch.autograd.grad(found.sum(), learned)

        times: dict[Choice, list[float]] = {}
        for choice in dict.fromkeys(every):
            try:
                call(choice)  # which builds masks, and compiles
                times[choice] = []
            except Exception as error:
                messages.debug(f"{choice} is out: {in_a_line(error)}")
        begun_s = clock.now()
        for number in range(ROUNDS[1]):
            if number >= ROUNDS[0] and clock.now() - begun_s > TUNE_S:
                break
            for choice in random.sample([*times], len(times)):
                times[choice].append(clock.timed(partial(call, choice), shape.device))
        return fastest(times, rule)


def _built(make: Callable[..., Any], *args: Any) -> Any:
    """Make masks that may also be used where gradients are needed."""
    import torch

    with torch.inference_mode(False), torch.no_grad():
        return make(*args)


def fastest(times: Mapping[Choice, list[float]], rule: Choice) -> Choice:
    """Return the fastest, by ratios in a round; the rule's choice unless it is clearly slower."""
    plain = times.get(rule) or next(iter(times.values()))
    ratios = {choice: median(map(truediv, found, plain)) for choice, found in times.items()}
    best = min(ratios, key=ratios.__getitem__)
    return best if ratios[best] < BETTER or rule not in times else rule


_PREPARED: OrderedDict[object, Prepared] = OrderedDict()
_CHOICES: dict[object, Choice] = {}


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
    mask_mod: MaskMod | None = None,
    score_mod: ScoreMod | None = None,
    scale: float | None = None,
    engine: str = "auto",
    tune: bool = False,
) -> torch.Tensor:
    """Return softmax(q @ k.mT * scale) @ v over the keys that the pattern lets each query see.

    Shapes: q is (batch, heads, queries, head_dim); k (batch, key_heads, keys, head_dim) and v
    (batch, key_heads, keys, value_dim), where key_heads divides heads; the result is (batch, heads,
    queries, value_dim). Query i and key i are at the same position. A query that sees no key
    gives zeros.

    Patterns, joined by + as in "causal+documents":
      full, causal
      sliding_window  the query's own key and those before it, `window` in all; or (left, right)
      prefix          the first `prefix` keys (a number, or one for each row) and those before it
      documents       keys with the same number in `documents`, (length,) or (batch, length);
                      a negative number is padding
      alibi           `slopes` (heads,) times the distance off each score; the paper's by default
      softcap         cap · tanh(score / cap)
    `mask_mod(batch, head, query, key)` and `score_mod(score, batch, head, query, key)` come after
    them, as torch's FlexAttention takes them; their indices are tensors that broadcast. Masks are
    kept: give the same function and the same tensors again.

    The engine is chosen by a rule: `dense` (one call of torch's SDPA), `chunks` (blocks of queries
    with the keys that they see) or `flex` (FlexAttention, compiled; on a CPU without gradients
    only). With `tune=True` the first call of a shape measures them, and the session remembers; on
    a CPU without gradients so does a call after a shape's first 7 seconds.
    torch.compile leaves this function as it is. Raises ArgumentError for what does not fit.
    """
    import torch

    __tracebackhide__ = True
    call = partial(
        _attention, Inputs(q, k, v, scale), pattern, engine, tune, window=window, prefix=prefix,
        documents=documents, slopes=slopes, cap=cap, mask_mod=mask_mod, score_mod=score_mod,
    )  # fmt: skip
    return torch.compiler.disable(call)() if torch.compiler.is_compiling() else call()


@hide_internal_frames
def _attention(inputs: Inputs, words: str, engine: str, tune: bool, **options: Any) -> torch.Tensor:
    import torch

    shape = _checked(inputs, options["documents"], engine)
    if torch.is_autocast_enabled(shape.device.type) and shape.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(shape.device.type)
        q, k, v = (one.to(dtype) for one in inputs[:3])
        inputs = inputs._replace(q=q, k=k, v=v)
        shape = inputs.shape
    alike, key = _keys(words, {**options, "heads": shape.heads, "device": shape.device})
    prepared = _prepared(key, words, shape, options)
    if engine != "auto":
        return prepared.run(inputs, Choice(engine, SIZES[0]))
    asked = (alike, shape, inputs.is_learned)
    if asked not in _CHOICES and (tune or prepared.pays(shape)):
        _CHOICES[asked] = prepared.measured(inputs)
    choice = _CHOICES.get(asked)
    if choice is None:
        return prepared.run_by_rule(inputs)
    if choice.engine == "flex" and prepared.can_flex:
        try:
            return prepared.run(inputs, choice)
        except Exception as error:
            if not is_compiler_error(error) and not isinstance(error, NotImplementedError):
                raise
            prepared.can_flex = False
            messages.warn(f"FlexAttention can't compute {words!r} here: {in_a_line(error)}")
    return prepared.run(inputs, prepared.by_rule(shape) if choice.engine == "flex" else choice)


def _checked(inputs: Inputs, documents: Any, engine: str) -> Shape:
    """Return the shape; raises ArgumentError with what is wrong about it."""
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


def _keys(words: str, options: Mapping[str, Any]) -> tuple[object, object]:
    """Return what patterns that are measured together share, and what tells each from others."""
    import torch

    alike, key = list[object]([words]), list[object]([words])
    for value in options.values():
        if isinstance(value, torch.Tensor):
            alike.append(tuple(value.shape))
            # A bias that is learned is computed at each call.
            key.append((id(value), None if value.requires_grad else version(value)))
        else:
            plain = tuple(value) if isinstance(value, list) else value
            alike.append(getattr(value, "__code__", plain))
            key.append(plain)
    return tuple(alike), tuple(key)


def _prepared(key: object, words: str, shape: Shape, options: Mapping[str, Any]) -> Prepared:
    import torch

    if key not in _PREPARED:
        here = {
            name: one.to(shape.device) if isinstance(one, torch.Tensor) else one
            for name, one in options.items()
        }
        here |= {"heads": shape.heads, "device": shape.device}
        _PREPARED[key] = Prepared(composed(names_in(words, here), here), options)
    _PREPARED.move_to_end(key)
    while len(_PREPARED) > KEPT:
        _PREPARED.popitem(last=False)
    return _PREPARED[key]


@functools.cache
def _module_class() -> type[torch.nn.Module]:
    """Return AttentionPattern, made once torch is there: this file imports nothing heavy."""
    import torch

    class AttentionPattern(torch.nn.Module):
        """`attention` with a pattern and its options as a module; shapes are those of `attention`.

        `AttentionPattern("sliding_window", window=256)(q, k, v)`. What changes from batch to batch
        is given at the call: `AttentionPattern("causal+documents")(q, k, v, documents=ids)`.
        Tensors among the options are buffers or parameters.
        """

        def __init__(self, pattern: str = "full", **options: Any) -> None:
            super().__init__()
            self.pattern = pattern
            self.options = {}
            for name, value in options.items():
                if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
                    self.register_buffer(name, value, persistent=False)
                elif isinstance(value, torch.nn.Parameter):
                    self.register_parameter(name, value)
                else:
                    self.options[name] = value

        def forward(
            self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any
        ) -> torch.Tensor:
            tensors = {**self._buffers, **self._parameters}
            return attention(q, k, v, self.pattern, **{**self.options, **tensors, **given})

        def extra_repr(self) -> str:
            return ", ".join([repr(self.pattern), *(f"{k}={v}" for k, v in self.options.items())])

    AttentionPattern.__qualname__ = "AttentionPattern"
    return AttentionPattern


def __getattr__(name: str) -> Any:
    if name == "AttentionPattern":
        return _module_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

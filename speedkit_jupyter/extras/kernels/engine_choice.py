"""Choose and call the engine of attention for a pattern and shape: by a rule, or by timing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from operator import truediv
from statistics import median
from typing import Any, NamedTuple

import torch

from speedkit_jupyter.extras.kernels import engines
from speedkit_jupyter.extras.kernels.engines import AttentionInputs, Shape, laid_out
from speedkit_jupyter.extras.kernels.patterns import Pattern
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.budget import Budget
from speedkit_jupyter.rounds.shuffled_rounds import ShuffledRounds
from speedkit_jupyter.state.snapshot import generators_kept
from speedkit_jupyter.support import messages
from speedkit_jupyter.support.exceptions import in_a_line
from speedkit_jupyter.torchglue.dynamo import is_compiler_error

# Queries per block: the smallest of SIZES that gives each thread THREAD_QUERIES queries, or 256.
SIZES, THREAD_QUERIES = (64, 128, 256), 64
# Up to this many queries, SDPA is slower than blocks for causal attention in training on a CPU.
CAUSAL_QUERIES = 1024
# If blocks would compute more than this share of all scores, one call for all queries is faster.
DENSE = 0.85
# Devices where the rule picks FlexAttention, from FLEX_QUERIES queries (its block size).
FLEX_DEVICES, FLEX_QUERIES = ("cuda", "xpu"), 128
# Timing takes about TUNE_S seconds after the first calls, in 3 to 40 rounds. The fastest engine
# replaces the rule's choice if its relative time is below BETTER.
TUNE_S, ROUNDS, BETTER = 2.0, (3, 40), 0.97
# Limit for patterns with cached masks, and for the cached layouts and block masks of a pattern.
MOST_KEPT = 16


class EngineChoice(NamedTuple):
    """An engine: dense, chunks or flex; `size` is the number of queries in a block of `chunks`."""

    engine: str
    size: int = 0


FLEX = EngineChoice("flex")


def is_unsupported(error: Exception) -> bool:
    """Return whether an error means that FlexAttention can't be compiled, or is not implemented."""
    return is_compiler_error(error) or isinstance(error, NotImplementedError)


class PatternChoices:
    """Measured engines and compiled FlexAttention of patterns that differ only in tensor values."""

    def __init__(self) -> None:
        self.can_flex = True
        self.choices: dict[object, EngineChoice] = {}
        self.flex = cache(engines.compiled_flex)


class Prepared:
    """A pattern with cached layouts and BlockMasks (`masks`) and measured engines (`known`)."""

    def __init__(self, pattern: Pattern, masks: dict[Any, Any], known: PatternChoices) -> None:
        self.pattern, self.masks, self.known = pattern, masks, known

    def made(self, make: Callable[..., Any], *args: Any) -> Any:
        made = self.masks.get((make, args))
        if made is None:
            # Made outside of inference mode, because later calls with gradients may use the masks.
            with torch.inference_mode(False), torch.no_grad():
                made = self.masks[make, args] = make(self.pattern, *args)
            if len(self.masks) > MOST_KEPT:
                self.masks.pop(next(iter(self.masks)), None)
        return made

    def run(self, inputs: AttentionInputs, choice: EngineChoice) -> torch.Tensor:
        shape, pattern = inputs.shape, self.pattern
        if choice.engine == "flex":
            device = shape.device
            flex = self.known.flex(device, shape if device.type == "cpu" else None)
            return engines.by_flex(inputs, pattern, flex, self.made(engines.block_mask, shape))
        if choice.engine == "dense" and pattern.is_plain:
            return engines.fused(inputs, is_causal=pattern.is_causal)
        size = choice.size if choice.engine == "chunks" else shape.queries
        return engines.by_blocks(inputs, pattern, self.made(laid_out, shape, size))

    def run_best(self, inputs: AttentionInputs, tune: bool) -> torch.Tensor:
        """Run the measured engine; if none is measured or flex fails, run the rule's engine."""
        known, shape, trains = self.known, inputs.shape, inputs.is_learned
        asked = shape, trains, torch.is_grad_enabled()
        if tune and asked not in known.choices:
            known.choices[asked] = self.measured(inputs)
        choice = known.choices.get(asked)
        if choice is None or (choice == FLEX and not known.can_flex):
            choice = self.by_rule(shape, trains)
        try:
            return self.run(inputs, choice)
        except Exception as error:
            if choice != FLEX or not is_unsupported(error):
                raise
            known.can_flex = False
            messages.warn(f"FlexAttention fails, another engine is used: {in_a_line(error)}")
        return self.run(inputs, self.by_rule(shape, trains))

    def by_rule(self, shape: Shape, trains: bool) -> EngineChoice:
        """Choose an engine without timing."""
        pattern, kind = self.pattern, shape.device.type
        is_short = kind == "cpu" and pattern.mask is not None and shape.queries <= CAUSAL_QUERIES
        if pattern.is_plain and not (is_short and trains):
            return EngineChoice("dense")
        if kind in FLEX_DEVICES and self.known.can_flex:
            return FLEX if shape.queries >= FLEX_QUERIES else EngineChoice("dense")
        queries = THREAD_QUERIES * torch.get_num_threads() / (shape.batch * shape.heads)
        size = next((size for size in SIZES if size >= queries), SIZES[-1])
        if shape.queries < 2 * size or self.made(laid_out, shape, size).share > DENSE:
            return EngineChoice("dense")
        return EngineChoice("chunks", size)

    @generators_kept()
    def measured(self, inputs: AttentionInputs) -> EngineChoice:
        """Time engines, with a backward pass if inputs need it; return the fastest that works."""
        shape, tracks = inputs.shape, inputs.is_learned
        qkv = [one.detach().requires_grad_(tracks and one.requires_grad) for one in inputs[:3]]
        rule, alone = self.by_rule(shape, tracks), AttentionInputs._make([*qkv, inputs.scale])
        learned = [one for one in qkv if one.requires_grad]
        chunks = [EngineChoice("chunks", size) for size in SIZES if size < shape.queries]
        can_flex = shape.device.type in FLEX_DEVICES or not torch.is_grad_enabled()
        every = [rule, EngineChoice("dense"), *chunks, *[FLEX] * can_flex]

        def call(choice: EngineChoice) -> None:
            found = self.run(alone, choice)
            if learned:
                torch.autograd.grad(found.sum(), learned)

        times, failure = dict[EngineChoice, list[float]](), None
        for choice in dict.fromkeys(every):
            try:
                call(choice)  # the first call builds masks and compiles
                times[choice] = []
            except Exception as error:
                failure = error
                messages.debug(f"{choice} is out: {in_a_line(error)}")
        if failure is not None and not times:  # all fail, so the user's own function is at fault
            raise failure
        budget, (least, most) = Budget(TUNE_S), ROUNDS
        left_s = lambda: budget.left_s  # noqa: E731
        for order in ShuffledRounds([*times], left_s, least=least, most=most):
            for choice in order:
                times[choice].append(clock.timed(partial(call, choice), shape.device))
        return fastest(times, rule)


def fastest(times: Mapping[EngineChoice, list[float]], rule: EngineChoice) -> EngineChoice:
    """Return the choice with the lowest median time ratio, or `rule` if that is nearly as fast."""
    plain = times.get(rule) or next(iter(times.values()))
    ratios = {choice: median(map(truediv, found, plain)) for choice, found in times.items()}
    best = min(ratios, key=ratios.__getitem__)
    return best if ratios[best] < BETTER or rule not in times else rule

"""Which way to compute attention: by a rule, by measuring, or by turns in calls of the user's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from operator import truediv
from statistics import median
from typing import Any, NamedTuple

import torch

from speedkit_jupyter.extras.kernels import engines
from speedkit_jupyter.extras.kernels.blocks import AttentionInputs, BlockLayout, Shape, laid_out
from speedkit_jupyter.extras.kernels.patterns import Pattern
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.budget import Budget
from speedkit_jupyter.rounds.shuffled_rounds import ShuffledRounds
from speedkit_jupyter.state.process import generators_kept
from speedkit_jupyter.support import messages
from speedkit_jupyter.support.exceptions import in_a_line
from speedkit_jupyter.torchglue.dynamo import is_compiler_error

# Queries in a block: the smallest that gives each thread this many. Fewer than two are one block.
SIZES, THREAD_QUERIES = (64, 128, 256), 64
# On a CPU blocks are faster than torch's own causal attention up to this length.
CAUSAL_QUERIES = 1024
# Where blocks compute more than this share of all scores, one call for all is faster.
DENSE = 0.85
# FlexAttention is compiled on these from this length on: its blocks have 128 queries.
FLEX_DEVICES, FLEX_QUERIES = ("cuda", "xpu"), 128
# This many patterns are kept with their masks, and of each the masks for this many shapes.
KEPT = 16
# Seconds of a measurement, its rounds at least and at most, and the share of the time of the rule's
# choice that another may take at most.
TUNE_S, ROUNDS, BETTER = 2.0, (3, 40), 0.97
# On a CPU without gradients compiled FlexAttention is up to twice as fast as the rule's choice, and
# takes this long to compile: a shape that has taken as long tries it, for some of its calls.
TRY_AFTER_S, TURNS = 5.0, 9


class EngineChoice(NamedTuple):
    """How attention is computed; `size` is that of a block of queries."""

    engine: str
    size: int = 0


FLEX = EngineChoice("flex")


@dataclass
class EngineTrial:
    """Seconds that a shape has taken by the rule, then those of calls by turns."""

    spent_s: float = 0.0
    times: dict[EngineChoice, list[float]] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        return bool(self.times) and all(len(one) >= TURNS for one in self.times.values())


class PatternChoices:
    """What patterns share that differ in the values of their tensors alone: what was found to be
    fastest for a shape and its gradients, and FlexAttention as it was compiled.
    """

    def __init__(self) -> None:
        self.can_flex = True
        self.choices: dict[object, EngineChoice] = {}
        self.trials: dict[Shape, EngineTrial] = {}
        self.flex = cache(engines.compiled_flex)

    def trial(self, shape: Shape) -> EngineTrial | None:
        """Return that of a shape which tries FlexAttention by itself, once it pays."""
        is_fit = shape.device.type == "cpu" and not torch.is_grad_enabled() and self.can_flex
        if not is_fit or torch.are_deterministic_algorithms_enabled():
            return None
        return self.trials.setdefault(shape, EngineTrial())


class Prepared:
    """A pattern, with its `masks` of the shapes that were asked for.

    `is_steady` says that they are those of an earlier call.
    """

    def __init__(
        self, pattern: Pattern, masks: dict[Any, Any], known: PatternChoices, is_steady: bool
    ) -> None:
        self.pattern, self.masks, self.known, self.is_steady = pattern, masks, known, is_steady

    def layout(self, shape: Shape, size: int) -> BlockLayout:
        """Return the blocks of `size` queries."""
        made: BlockLayout = self._made(laid_out, shape, size)
        return made

    def _made(self, make: Callable[..., Any], *args: Any) -> Any:
        made = self.masks.get((make, args))
        if made is None:
            # Masks may also be used where gradients are needed.
            with torch.inference_mode(False), torch.no_grad():
                made = self.masks[make, args] = make(self.pattern, *args)
            if len(self.masks) > KEPT:
                self.masks.pop(next(iter(self.masks)), None)
        return made

    def run(self, inputs: AttentionInputs, choice: EngineChoice) -> torch.Tensor:
        """Return attention, computed as it was chosen."""
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

    def run_safely(self, inputs: AttentionInputs, choice: EngineChoice) -> torch.Tensor:
        """Return attention as it was chosen; by the rule where FlexAttention can't compute it."""
        if choice.engine != "flex":
            return self.run(inputs, choice)
        if self.known.can_flex:
            try:
                return self.run(inputs, choice)
            except Exception as error:
                if not is_compiler_error(error) and not isinstance(error, NotImplementedError):
                    raise
                self.known.can_flex = False
                messages.warn(f"FlexAttention can't compute this here: {in_a_line(error)}")
        return self.run(inputs, self.by_rule(inputs.shape))

    def run_best(self, inputs: AttentionInputs, tune: bool) -> torch.Tensor:
        """Return attention as it was found to be fastest, or else by the rule."""
        known, shape = self.known, inputs.shape
        asked = shape, inputs.is_learned, torch.is_grad_enabled()
        if tune and asked not in known.choices:
            known.choices[asked] = self.measured(inputs)
        if asked in known.choices:
            return self.run_safely(inputs, known.choices[asked])
        # A function that reads something else in each call would be compiled anew each time.
        rule, trial = self.by_rule(shape), known.trial(shape) if self.is_steady else None
        if trial is None:
            return self.run_safely(inputs, rule)
        found = self._by_turns(inputs, rule, trial)
        if trial.is_over:
            known.choices[asked] = fastest(trial.times, rule)
        return found

    def _by_turns(
        self, inputs: AttentionInputs, rule: EngineChoice, trial: EngineTrial
    ) -> torch.Tensor:
        """Return attention by the rule; for a shape that has taken long by turns with others."""
        if trial.spent_s >= TRY_AFTER_S and not trial.times:
            trial.times = {rule: []}
            if self._agrees(inputs, rule):
                trial.times[FLEX] = []
        choice = min(trial.times or [rule], key=lambda one: len(trial.times.get(one, ())))
        begun_s = clock.now()
        found = self.run(inputs, choice)
        took_s = clock.now() - begun_s
        trial.spent_s += took_s
        if trial.times:
            trial.times[choice].append(took_s)
        return found

    def _agrees(self, inputs: AttentionInputs, rule: EngineChoice) -> bool:
        """Return whether FlexAttention can be compiled, and gives what the rule's choice does."""
        try:
            found, wanted = self.run(inputs, FLEX), self.run(inputs, rule)
            near = torch.finfo(wanted.dtype).eps ** 0.5
            if torch.allclose(found, wanted, near, near, equal_nan=True):
                return True
            why = "it gives other values"
        except Exception as error:
            why = in_a_line(error)
        messages.debug(f"FlexAttention is out: {why}")
        return False

    def by_rule(self, shape: Shape) -> EngineChoice:
        """Return what is fastest for most."""
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
        """Return the fastest, with the backward pass where one may follow."""
        shape, tracks = inputs.shape, inputs.is_learned
        q, k, v = (one.detach().requires_grad_(tracks and one.requires_grad) for one in inputs[:3])
        rule, alone = self.by_rule(shape), inputs._replace(q=q, k=k, v=v)
        learned = [one for one in (q, k, v) if one.requires_grad]
        every = [
            rule,
            EngineChoice("dense"),
            *(EngineChoice("chunks", s) for s in SIZES if s < shape.queries),
        ]
        if shape.device.type in FLEX_DEVICES or not torch.is_grad_enabled():
            every.append(FLEX)

        def call(choice: EngineChoice) -> None:
            found = self.run(alone, choice)
            if learned:
                torch.autograd.grad(found.sum(), learned)

        times: dict[EngineChoice, list[float]] = {}
        for choice in dict.fromkeys(every):
            try:
                call(choice)  # which builds masks, and compiles
                times[choice] = []
            except Exception as error:
                messages.debug(f"{choice} is out: {in_a_line(error)}")
        budget, (least, most) = Budget(TUNE_S), ROUNDS
        for order in ShuffledRounds(
            lambda: [*times], lambda: budget.left_s, least=least, most=most
        ):
            for choice in order:
                times[choice].append(clock.timed(partial(call, choice), shape.device))
        return fastest(times, rule)


def fastest(times: Mapping[EngineChoice, list[float]], rule: EngineChoice) -> EngineChoice:
    """Return the fastest, by ratios in a round; the rule's choice unless it is clearly slower."""
    plain = times.get(rule) or next(iter(times.values()))
    ratios = {choice: median(map(truediv, found, plain)) for choice, found in times.items()}
    best = min(ratios, key=ratios.__getitem__)
    return best if ratios[best] < BETTER or rule not in times else rule

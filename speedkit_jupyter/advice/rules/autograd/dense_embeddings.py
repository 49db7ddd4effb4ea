"""Embedding tables whose gradient is as large as the table, for the few rows that a step asks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from speedkit_jupyter.advice.gain import Gain, amdahl
from speedkit_jupyter.advice.opportunity import Opportunity
from speedkit_jupyter.advice.rules import trials
from speedkit_jupyter.advice.rules.base import Rule
from speedkit_jupyter.advice.situation import Situation
from speedkit_jupyter.support.words import share

if TYPE_CHECKING:
    import torch

# A table has so many times as many rows as a step asks for, and so many numbers.
ROWS, NUMBERS = 10, 100_000
LEAST = 0.05
# Of the time of optimizer and backward pass so much goes at the least.
HALF = 0.5
OPERATORS = ("aten::embedding_dense_backward", "aten::_embedding_bag_dense_backward")


class DenseEmbeddings(Rule):
    """`nn.Embedding` without `sparse=True`: zeros for all other rows are written and stepped."""

    name: ClassVar[str] = "dense_embeddings"

    def find(self, seen: Situation) -> Iterator[Opportunity]:
        """All tables together."""
        tables = _tables(seen)
        numbers = sum(one.weight.numel() for one in tables)
        held = sum(one.numel() for one in seen.parameters if id(one) in seen.held)
        if not tables or not held:
            return
        stepped = seen.share("optimizer") * min(numbers / held, 1.0)
        written = seen.operators(*OPERATORS)
        taken = stepped + written
        if taken < LEAST:
            return
        # without times of operators nobody knows how much of the backward pass it is
        most = taken if seen.profile.costs is not None else stepped + seen.share("backward")
        plain = all(_is_plain(one) for one in seen.optimizers)
        yield Opportunity(
            self.name,
            f"sparse gradients of {_names(seen, tables)}",
            f"{sum(one.num_embeddings for one in tables):,} rows, of which a step asks "
            f"{_asked(seen):,.0f} at most; their dense gradients and steps: {share(most)} of the "
            "step",
            Gain(amdahl(taken * HALF, 1e9).low, amdahl(most, 1e9).low),
            "nn.Embedding(…, sparse=True)"
            + ("" if plain else ", and torch.optim.SparseAdam for the tables alone"),
            "none with plain SGD"
            if plain
            else "rows that no sample asks for stay as they are, "
            "where momentum or weight decay would move them: another training",
            trial=trials.sparse_tables if plain or _is_adam(seen) else None,
            share=most,
        )


def _tables(seen: Situation) -> list[torch.nn.Embedding | torch.nn.EmbeddingBag]:
    """Large ones that get gradients, and whose weight nothing else computes with."""
    import torch

    modules = [one for model in seen.models for one in model.modules()]
    used = [id(one) for module in {id(m): m for m in modules}.values()
            for one in module.parameters(recurse=False)]  # fmt: skip
    asked = _asked(seen)
    return [
        one
        for one in {id(one): one for one in modules}.values()
        if isinstance(one, torch.nn.Embedding | torch.nn.EmbeddingBag)
        and not (one.sparse or one.scale_grad_by_freq)
        and id(one.weight) in seen.watched.got_gradients
        and used.count(id(one.weight)) == 1
        and one.weight.numel() >= NUMBERS
        and one.num_embeddings >= ROWS * asked > 0
    ]


def _asked(seen: Situation) -> float:
    """How many rows a step asks for at most: all whole numbers that models are given."""
    given = [one for call in seen.watched.calls for one in call.inputs]
    whole = [one.numel() for one in given if not (one.is_floating_point() or one.is_complex())]
    return sum(whole) / max(seen.watched.steps, 1)


def _is_plain(optimizer: torch.optim.Optimizer) -> bool:
    """Whether rows without a gradient stay as they are."""
    import torch

    return isinstance(optimizer, torch.optim.SGD) and not any(
        group["momentum"] or group["weight_decay"] for group in optimizer.param_groups
    )


def _is_adam(seen: Situation) -> bool:
    """Whether sparse steps of all optimizers are Adam's, but for rows that nobody asks for."""
    return all(map(trials.steps_rows, seen.optimizers))


def _names(seen: Situation, tables: list[torch.nn.Embedding | torch.nn.EmbeddingBag]) -> str:
    return ", ".join(seen.name(one, "an embedding") for one in tables[:3])

"""All rules by name, in the order in which they are asked.

A rule is one known reason why steps are slow: a function that yields opportunities for a situation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from speedkit_jupyter.extras.advise.advice import Opportunity
from speedkit_jupyter.extras.advise.rules import autograd, data, lines, models
from speedkit_jupyter.extras.advise.situation import Situation

Rule = Callable[[Situation], Iterator[Opportunity]]
# Of several opportunities about the same lines only the first rule's is kept: rules about one kind
# of call come before rules about lines in general.
RULES: dict[str, Rule] = {
    **{name: partial(lines.costly_calls, name) for name in lines.CALLS},
    **{
        rule.__name__: rule
        for rule in (
            lines.growing_copies,
            lines.parameter_loops,
            lines.synchronizations,
            models.one_by_one,
            models.recurrent_cells,
            models.same_forward_twice,
            data.in_memory,
            data.kept_samples,
            data.workers,
            data.worker_start,
            models.padding,
            models.small_batch,
            autograd.no_grad,
            autograd.anomaly_mode,
            autograd.graph_kept,
            autograd.graphs_of_graphs,
            autograd.frozen_gradients,
            autograd.frozen_in_optimizer,
            autograd.dense_embeddings,
            models.double_precision,
            models.attention_by_hand,
            models.dense_mask,
            models.sparse_products,
            models.catalog,
            lines.slow_lines,
        )
    },
}
# These save memory or prevent a mistake: they are kept also without an expected gain.
ALWAYS = frozenset({"graph_kept", "graphs_of_graphs", "frozen_in_optimizer"})

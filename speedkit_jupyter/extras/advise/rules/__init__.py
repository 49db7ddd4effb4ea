"""All rules, in the order in which they speak: of the same lines the first one alone is heard.

A rule is one known reason why steps are slow: a function that yields what it sees of it in a step.
Its name is its name in reports, tests and `--try`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from speedkit_jupyter.extras.advise.advice import Opportunity
from speedkit_jupyter.extras.advise.rules import autograd, data, lines, python, settings
from speedkit_jupyter.extras.advise.situation import Situation

RULES: tuple[Callable[[Situation], Iterator[Opportunity]], ...] = (
    lines.cleaning,
    lines.copied_state,
    lines.growing_copies,
    lines.parameter_loops,
    lines.tensor_of_list,
    lines.writing,
    python.synchronizations,
    python.one_by_one,
    python.recurrent_cells,
    python.same_forward_twice,
    data.in_memory,
    data.kept_samples,
    data.workers,
    data.worker_start,
    data.pin_memory,
    data.padding,
    data.small_batch,
    autograd.no_grad,
    autograd.anomaly_mode,
    autograd.graph_kept,
    autograd.graphs_of_graphs,
    autograd.frozen_gradients,
    autograd.frozen_in_optimizer,
    autograd.dense_embeddings,
    settings.busy_machine,
    settings.double_precision,
    settings.attention_by_hand,
    settings.dense_mask,
    settings.sparse_products,
    settings.catalog,
    python.slow_lines,
)
# These save memory or prevent a mistake: they speak also where no time is to be gained.
ALWAYS = frozenset({"graph_kept", "graphs_of_graphs", "frozen_in_optimizer"})

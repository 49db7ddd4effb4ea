"""All rules by name, in the order of application.

A rule is a function that takes a Situation and yields opportunities about one cause of slowness.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from speedkit_jupyter.extras.advise.advice import Opportunity
from speedkit_jupyter.extras.advise.rules import data, lines, models
from speedkit_jupyter.extras.advise.situation import Situation

Rule = Callable[[Situation], Iterator[Opportunity]]
# If several rules find the same lines, the first rule wins: rules about one kind
# of call come before rules about lines in general.
ORDER = (
    lines.synchronizations, models.one_by_one, data.in_memory, data.workers, data.worker_start,
    data.padding, data.many_lengths, models.no_grad, models.anomaly_mode, models.graph_kept,
    models.frozen_gradients, models.double_precision, models.attention_by_hand,
    models.adapter_dropout, models.needless_checkpointing, models.needless_float32,
    lines.slow_lines,
)  # fmt: skip
RULES: dict[str, Rule] = {
    **{name: partial(lines.costly_code, name) for name in lines.COSTLY},
    **{rule.__name__: rule for rule in ORDER},
}
# Rules that save memory: their opportunities are kept even if the expected gain is small.
ALWAYS = frozenset({"graph_kept", "kept_logits"})

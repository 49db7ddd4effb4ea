"""All rules by name, in the order in which they are asked.

A rule is one known reason why steps are slow: a function that yields opportunities for a situation.
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
RULES: dict[str, Rule] = {
    **{name: partial(lines.costly_code, name) for name in lines.COSTLY},
    **{
        rule.__name__: rule
        for rule in (
            lines.synchronizations,
            models.one_by_one,
            data.in_memory,
            data.workers,
            data.worker_start,
            data.padding,
            models.no_grad,
            models.anomaly_mode,
            models.graph_kept,
            models.frozen_gradients,
            models.double_precision,
            models.attention_by_hand,
            lines.slow_lines,
        )
    },
}
# A rule that saves memory: its opportunities are kept also without an expected gain.
ALWAYS = frozenset({"graph_kept"})

"""All rules, in the order in which they speak: of the same lines the first one alone is heard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from speedkit_jupyter.advice.opportunity import Opportunity
from speedkit_jupyter.advice.rules import autograd, data, python, settings
from speedkit_jupyter.advice.situation import Situation

Find = Callable[[Situation], Iterator[Opportunity]]


@dataclass(frozen=True)
class Rule:
    """One known reason why steps are slow: `find` yields what it sees of it in a step.

    A rule that `saves_memory`, or prevents a mistake, speaks also where no time is to be gained.
    """

    find: Find
    saves_memory: bool = False

    @property
    def name(self) -> str:
        """Return its name in reports, tests and `--try`."""
        return self.find.__name__


RULES: tuple[Rule, ...] = (
    Rule(python.cleaning),
    Rule(python.copied_state),
    Rule(python.growing_copies),
    Rule(python.parameter_loops),
    Rule(python.tensor_of_list),
    Rule(python.writing),
    Rule(python.synchronizations),
    Rule(python.one_by_one),
    Rule(python.recurrent_cells),
    Rule(python.same_forward_twice),
    Rule(data.in_memory),
    Rule(data.kept_samples),
    Rule(data.workers),
    Rule(data.worker_start),
    Rule(data.pin_memory),
    Rule(data.padding),
    Rule(data.small_batch),
    Rule(autograd.no_grad, saves_memory=True),
    Rule(autograd.anomaly_mode),
    Rule(settings.deterministic),
    Rule(autograd.gradients_one_by_one),
    Rule(autograd.graph_kept, saves_memory=True),
    Rule(autograd.graphs_of_graphs, saves_memory=True),
    Rule(autograd.set_to_none),
    Rule(autograd.frozen_gradients),
    Rule(autograd.frozen_in_optimizer, saves_memory=True),
    Rule(autograd.dense_embeddings),
    Rule(autograd.input_gradients),
    Rule(settings.large_logits, saves_memory=True),
    Rule(settings.optimizer_state, saves_memory=True),
    Rule(settings.busy_machine),
    Rule(settings.distribution_checks),
    Rule(settings.double_precision),
    Rule(settings.attention_by_hand),
    Rule(settings.sparse_products),
    Rule(settings.recompiling),
    Rule(settings.learned),
    Rule(settings.catalog),
    Rule(python.slow_lines),
)

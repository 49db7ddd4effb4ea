"""Graphs are counted per variant; rounds in which something is compiled are left out."""

from queue import SimpleQueue

import pytest
import torch
from torch import nn

from speedkit_jupyter import StateWarning, benchmark
from speedkit_jupyter.rounds.benchmark import Benchmark
from speedkit_jupyter.rounds.budget import Compilations
from speedkit_jupyter.step.step import step_of
from speedkit_jupyter.step.variants import of_values, variant

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("nothing_compiled")]


class Breaking(nn.Linear):
    def forward(self, x):
        x = super().forward(x)
        torch._dynamo.graph_break()
        return x + 1


def test_graphs_are_counted():
    compiled = torch.compile(Breaking(4, 4), backend="eager")
    found = Compilations()
    for batch, graphs in ((2, 2), (3, 4), (3, 4)):
        with found.counted():
            compiled(torch.rand(batch, 4))
        assert found == Compilations(graphs, limit_reached=False)


def test_the_recompile_limit_is_noticed():
    compiled = torch.compile(nn.Linear(4, 4), backend="eager", dynamic=False)
    found = Compilations()
    with torch._dynamo.config.patch(recompile_limit=3), found.counted():
        for batch in range(2, 8):
            compiled(torch.rand(batch, 4))
    assert found.limit_reached


def test_a_round_in_which_something_is_compiled_is_left_out():
    calls = SimpleQueue()  # measurements don't restore queues
    double = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    network = nn.Linear(4, 4)

    def step():
        calls.put(1)
        return network(double(torch.ones(2 + calls.qsize() // 9, 4))).sum()

    with torch._dynamo.config.patch(recompile_limit=100), pytest.warns(StateWarning):
        comparison = benchmark(step, ["baseline", "baseline"], budget_s=1.0)
    first, second = comparison.records
    assert comparison.compiled_rounds >= 1
    assert first.compilations.graphs + second.compilations.graphs >= 2
    assert len(first.times_s) == len(second.times_s) > 0
    assert "left out: something was compiled in them" in str(comparison.report())


@pytest.mark.slow
def test_ten_compiled_variants_of_a_model_that_breaks_its_graph_run_their_own_graphs():
    network, x = Breaking(4, 4), torch.rand(8, 4)
    plan = {"compile": {"enabled": True, "backend": "aot_eager"}}
    variants = [variant("baseline"), *(of_values(f"compile {n}", plan) for n in range(10))]
    bench = Benchmark(step_of(lambda: network(x).sum().backward()), variants, 0.9)
    list(bench.run())
    comparison = bench.result()
    assert len(comparison.records) == 11
    for record in comparison.records[1:]:
        assert record.failure is None
        assert record.compilations == Compilations(graphs=2), record
    assert comparison.baseline.compilations.graphs == 0

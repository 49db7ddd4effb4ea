"""distributed: what is decided, and how it is written; tests/extras/processes trains by it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch.utils.data import DataLoader

from speedkit_jupyter import Facts, Hardware, SpeedConfig
from speedkit_jupyter.catalog import named
from speedkit_jupyter.catalog.properties.sharding import RankBatches, Turns
from speedkit_jupyter.machines.probes import links_in

ENTRY = named("distributed")
TWO = Facts(processes=2, parameters=1000, block_classes=("Block",))
BIG = replace(TWO, parameters=2 * 10**9, device="cuda:0", devices=("cuda:0",))


def decided(value, facts, machine="cpu"):
    request = SpeedConfig(distributed=value).request("distributed")
    return ENTRY.decide(request, Hardware.from_json(machine), facts)


@pytest.mark.parametrize(
    ("value", "facts", "machine", "strategy", "reason"),
    [
        ("auto", Facts(), "cpu", False, "one process"),
        ("ddp", Facts(), "cpu", False, "one process"),
        ("auto", TWO, "cpu", "ddp", "fits into each rank"),
        ("auto", BIG, "t4", "fsdp2", "each of 2 holds a part"),
        ("auto", replace(BIG, processes=16, hosts=2), "t4", "hybrid", "one host holds it"),
        ("hybrid", TWO, "cpu", False, "several hosts"),
        ("fsdp2", TWO, "cpu", "fsdp2", "over 2 ranks"),
        ("auto", replace(TWO, launcher="Accelerate"), "cpu", False, "Accelerate spreads"),
        ("ddp", replace(TWO, launcher="Accelerate"), "cpu", "ddp", "no links to choose by"),
        ("ddp", replace(TWO, launcher="Lightning"), "cpu", False, "Lightning spreads"),
        ("ddp", replace(TWO, compiled="in place"), "cpu", False, "compiled"),
    ],
)
def test_the_strategy_follows_from_memory_and_hosts_with_a_reason(
    value, facts, machine, strategy, reason
):
    decision = decided(value, facts, machine)
    assert decision.value == strategy
    assert decision.active is bool(strategy)
    assert reason in decision.reason


NVLINK = "GPU0\t X \tNV12\tSYS\t0-15\t0\nGPU1\tNV12\t X \tSYS\t0-15\t0\nNIC0\tSYS\tSYS\t X\n"


@pytest.mark.parametrize(
    ("table", "links"),
    [(NVLINK, "NVLink"), (NVLINK.replace("NV12", "PHB"), "PCIe"), ("GPU0\t X \t0-3\n", "")],
)
def test_links_are_read_from_nvidias_own_table(table, links):
    assert links_in(f"\x1b[4m\tGPU0\tGPU1\tCPU Affinity\x1b[0m\n{table}\nLegend:\n") == links


@pytest.mark.parametrize(
    ("links", "parameters", "reshard"),
    [("NVLink", 10**8, True), ("PCIe", 10**8, False), ("PCIe", 2 * 10**9, True), ("", 10**8, True)],
)
def test_over_pcie_weights_that_fit_are_gathered_once_a_step(links, parameters, reshard):
    machine = Hardware.from_json("t4").model_copy(update={"links": links})
    facts = replace(BIG, parameters=parameters)
    request = SpeedConfig(distributed="fsdp2").request("distributed")
    decision = ENTRY.decide(request, machine, facts)
    assert decision.details["reshard"] is reshard
    assert (links or "unknown links") in decision.reason
    kept = SpeedConfig.from_dict({"distributed": {"strategy": "fsdp2", "reshard": True}})
    assert ENTRY.decide(kept.request("distributed"), machine, facts).details["reshard"]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("samples", range(3, 30))
def test_ranks_have_as_many_batches_and_together_each_sample_once(samples, drop_last):
    """Of an epoch in an order, and of one without an index; another rank waits at each batch."""
    for batch, size in ((1, 2), (2, 2), (2, 3), (5, 3)):
        ranks = [
            list(RankBatches(samples, batch * size, drop_last, True, rank, size, seed=0))
            for rank in range(size)
        ]
        assert len({*map(len, ranks)}) == 1
        drawn = [sample for batches in ranks for one in batches for sample in one]
        assert len({*drawn}) == len(drawn)
        assert len(drawn) == (samples // (batch * size) * batch * size if drop_last else samples)
        turns = [Turns(range(samples), rank, size, batch, drop_last) for rank in range(size)]
        loaders = [DataLoader(one, batch, drop_last=drop_last) for one in turns]
        assert len({len([*loader]) for loader in loaders}) == 1
        drawn = [sample for one in turns for sample in one]
        assert len({*drawn}) == len(drawn) > samples - size


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_the_plan_is_written_as_plain_torch(strategy):
    decision = decided(strategy, TWO)
    snippet = ENTRY.code(decision, TWO, "torch")
    compile("\n".join((*snippet.imports, *snippet.setup, *snippet.model)), "code", "exec")

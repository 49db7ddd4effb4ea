"""distributed: its decisions and its code; tests/extras/processes trains by it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from speedkit_jupyter import Facts, Hardware, SpeedConfig
from speedkit_jupyter.catalog import named
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
        ("fsdp2", TWO, "cpu", "fsdp2", "over 2 ranks"),
        ("auto", replace(TWO, launcher="Accelerate"), "cpu", False, "Accelerate spreads"),
        ("ddp", replace(TWO, launcher="Accelerate"), "cpu", "ddp", "over 2 ranks"),
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


@pytest.mark.parametrize("links", ["NVLink", "PCIe"])
def test_over_pcie_bf16_is_proposed_for_the_gradients(links):
    machine = Hardware.from_json("t4").model_copy(update={"links": links})
    request = SpeedConfig(distributed="ddp").request("distributed")
    decision = ENTRY.decide(request, machine, BIG)
    assert ("`reduce: bf16`" in decision.hint) == (links == "PCIe")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_the_plan_is_written_as_plain_torch(strategy):
    decision = decided(strategy, TWO)
    snippet = ENTRY.code(decision, TWO, "torch")
    compile("\n".join((*snippet.imports, *snippet.setup, *snippet.model)), "code", "exec")

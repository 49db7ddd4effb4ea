"""distributed: its decisions and its code; tests/extras/processes trains by it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from speedkit_jupyter import Facts, Hardware, SpeedConfig
from speedkit_jupyter.catalog import named

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


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_the_plan_is_written_as_plain_torch(strategy):
    decision = decided(strategy, TWO)
    snippet = ENTRY.code(decision, TWO, "torch")
    compile("\n".join((*snippet.imports, *snippet.setup, *snippet.model)), "code", "exec")

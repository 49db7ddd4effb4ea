"""What a machine counts beside time: a column and a field where it does, else nothing."""

from __future__ import annotations

import csv

import pytest
import torch
from torch import nn

from speedkit_jupyter import benchmark
from speedkit_jupyter.machines import devices, energy
from speedkit_jupyter.measure.checks import counted_columns
from speedkit_jupyter.measure.results.comparison import Comparison

CPU = torch.device("cpu")


@pytest.fixture
def powercap(tmp_path, monkeypatch):
    """Linux's folder; `counter(package, microjoules)` writes one."""
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)

    def counter(package: str, microjoules: object, most: int = 10_000_000) -> None:
        folder = tmp_path / package
        folder.mkdir(exist_ok=True)
        (folder / "energy_uj").write_text(f"{microjoules}\n")
        (folder / "max_energy_range_uj").write_text(f"{most}\n")

    return counter


@pytest.fixture
def steps_counted(monkeypatch):
    """A machine that counts each forward pass as half a joule."""
    passes = [0]
    names = ("energy_j", "energy", "J", "Energy: of forward passes.")
    counted = counted_columns.Quantity(*names, lambda device: lambda: 0.5 * passes[0])
    monkeypatch.setattr(counted_columns, "QUANTITIES", (counted,))
    monkeypatch.setattr(counted_columns, "LEAST_S", 0.01)
    return passes


def test_joules_of_all_packages_are_added_and_a_counter_that_begins_again_counts_on(powercap):
    powercap("intel-rapl:0", 9_000_000)
    powercap("intel-rapl:1", 500_000)
    powercap("intel-rapl:0:0", 7)  # a part of the first
    read = devices.joules(CPU)
    before = read()
    powercap("intel-rapl:0", 1_000_000)
    powercap("intel-rapl:1", 750_000)
    assert read() - before == pytest.approx(2.25)


def test_what_nobody_may_read_or_nothing_counts_is_not_measured(powercap):
    assert devices.joules(CPU) is None
    powercap("intel-rapl:0", "")
    assert devices.joules(CPU) is None
    assert devices.joules(torch.device("meta")) is None


def test_a_quantity_is_a_column_a_field_and_a_line_of_the_file(made_time, steps_counted, tmp_path):
    model = nn.Linear(4, 4)
    x = torch.ones(2, 4)

    def step():
        steps_counted[0] += 1
        made_time.sleep(0.002)
        return model(x)

    comparison = benchmark(step, "baseline,channels_last,bf16", model=model, budget_s=4)
    assert comparison.baseline.quantities["energy_j"] == pytest.approx(0.5)
    text = str(comparison)
    assert any("median" in line and "energy" in line for line in text.splitlines())
    assert "500 mJ" in text
    assert "Energy: of forward passes." in " ".join(str(comparison.report()).split())
    again = Comparison.from_dict(comparison.to_dict())
    assert again.baseline.quantities == comparison.baseline.quantities
    comparison.save(tmp_path / "table.csv")
    rows = list(csv.DictReader((tmp_path / "table.csv").open()))
    assert float(rows[0]["energy_j"]) == pytest.approx(0.5)
    assert float(rows[0]["energy_per_sample_j"]) == pytest.approx(0.25)
    assert "energy a sample" in text

"""Use the panel in a notebook, together with magics."""

import asyncio

import pytest

from speedkit_jupyter import Panel
from speedkit_jupyter.state import measurement_guard

pytestmark = pytest.mark.usefixtures("trusted")


@pytest.fixture
def panel(shell):
    return Panel(shell.names["model"], budget_s=0.3)


@pytest.mark.smoke
def test_the_last_speedbench_cell_is_what_measure_times(shell, panel):
    shell.run("%%speedbench -n 1 -r 1 -q\nloss = loss_fn(model(x), y); loss.backward()")
    assert "loss = loss_fn(model(x), y)" in panel.status.value
    panel.buttons["Measure"].click()
    assert [one.name for one in panel.result.records] == ["baseline", "auto"]
    assert panel.result.baseline.times_s
    shell.run("%%speedbench -n 1 -r 1 -q\nx + 1")
    panel.buttons["Measure"].click()
    assert "the step does not use this model" in panel.status.value


def test_a_speedbench_cell_while_the_panel_measures_is_refused_in_one_line(shell, panel):
    shell.run("def step(): return model(x).sum().backward()")
    panel = Panel(shell.names["model"], step="step", budget_s=600)
    errors = []

    async def main() -> None:
        panel.buttons["Measure"].click()
        while measurement_guard.in_progress() is None:  # act at once: the run ends soon
            await asyncio.sleep(0)
        errors.append(shell.fails("%%speedbench\nmodel(x)"))
        panel.buttons["Stop"].click()
        while not panel.buttons["Stop"].disabled:
            await asyncio.sleep(0)

    asyncio.run(main())
    assert "another measurement is in progress" in str(errors[0])
    shell.run("%%speedbench -n 1 -r 1 -q\nmodel(x)")


@pytest.mark.smoke
def test_unloading_restores_what_the_panel_applied(shell, panel):
    panel.buttons["Apply"].click()
    shell.run("%reload_ext speedkit_jupyter")
    assert panel.context is None
    assert shell.names["optimizer"].param_groups[0]["fused"] is None

"""A cell or a named step that only makes a coroutine or a generator is refused in one line."""

from __future__ import annotations

import pytest
from IPython.core.error import UsageError

SETUP = """
async def waits():
    model(x)
def goes():
    yield model(x)
class Trainer:
    async def step(self):
        model(x)
trainer = Trainer()
"""


@pytest.mark.parametrize("last", ["waits()", "goes()", "trainer.step()"])
@pytest.mark.parametrize("way", ["--compare baseline,threads:1", "--tune --fresh"])
def test_the_last_line_of_a_cell(shell, way, last):
    shell.run(SETUP)
    error = shell.fails(f"%%speedbench {way} --budget 0.1\nmodel(x)\n{last}")
    assert isinstance(error, UsageError)
    assert "that nobody runs" in str(error)
    assert len(str(error).splitlines()) == 1


@pytest.mark.parametrize("step", ["waits", "goes", "trainer.step"])
def test_the_step_of_a_verification(shell, step):
    shell.run(SETUP)
    error = shell.fails(f"%speedkit verify --step {step} --steps 2")
    assert isinstance(error, UsageError)
    assert "calling it runs none of it" in str(error)
    assert len(str(error).splitlines()) == 1


def test_a_cell_that_goes_through_one_is_measured(shell):
    shell.run(SETUP)
    assert "baseline" in shell.run(
        "%%speedbench --compare baseline,threads:1 --budget 0.1\nlist(goes())"
    )

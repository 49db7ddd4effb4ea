"""`@optimization` in a notebook: the magics take the name from then on."""

from __future__ import annotations

import pytest

from speedkit_jupyter.plans import own_kernels

pytestmark = pytest.mark.usefixtures("made_time")

CELL = """
from speedkit_jupyter import optimization
@optimization("my_relu", replaces=nn.ReLU)
def halves(module, x):
    return x.clamp(min=0)
"""


@pytest.fixture
def with_kernel(shell):
    shell.run(CELL)
    yield shell
    own_kernels.forget("my_relu")


def test_apply_takes_its_name_and_reports_it(with_kernel):
    shown = with_kernel.run("%speedkit apply model --my_relu true")
    assert "my_relu" in shown
    assert "halves() for 1 ReLU" in shown
    assert "MethodType(halves, module)" in with_kernel.run("%speedkit code model")
    with_kernel.run("%speedkit restore")


def test_a_comparison_takes_it_and_a_cell_that_is_run_again_is_the_same(with_kernel):
    with_kernel.run(CELL)
    shown = with_kernel.run("%%speedbench --compare baseline,my_relu --budget 0.2\nmodel(x)")
    assert "my_relu" in shown


def test_catalog_explain_and_help_know_it(with_kernel):
    for line in ("catalog", "explain my_relu", "help apply"):
        assert "my_relu" in with_kernel.run(f"%speedkit {line}")

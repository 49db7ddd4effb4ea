"""What a measured cell does to the notebook's names, however it binds them."""

from __future__ import annotations

import pytest

STEP = "\nloss_fn(model(x), y).backward(); optimizer.step(); optimizer.zero_grad()"


@pytest.mark.parametrize(("name", "what"), [("model", "a model"), ("optimizer", "an optimizer")])
@pytest.mark.parametrize(
    "line", ["%%speedbench --compare baseline,threads:1 --budget 0.05", "%%speedbench -n 1 -r 1"]
)
def test_the_result_takes_no_name_of_a_model_or_an_optimizer(shell, name, what, line):
    found = shell.names[name]
    error = shell.fails(f"{line} -v {name}{STEP}")
    assert f"-v {name}: {name} is {what}" in str(error)
    assert shell.names[name] is found

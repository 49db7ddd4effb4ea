"""What a measured cell does to the notebook's names, however it binds them."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.usefixtures("trusted")

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


BINDINGS = {
    "a star": "from math import *",
    "globals()": "globals()['e'] = globals()['made'] = 1",
    "exec": "exec('e = made = 1')",
    "exec elsewhere": "def bind(): exec('e = made = 1', globals())\nbind()",
    "globals() that deletes": "globals().pop('e', None)",
    "the shell": "get_ipython().user_ns['e'] = 1",
    "a module of its own": "import sys\nsys.modules[__name__].__dict__['e'] = 1",
    "a walrus in a comprehension": "[e := i for i in range(2)]",
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("code", BINDINGS.values(), ids=BINDINGS)
def test_every_name_means_what_it_meant_however_a_measured_cell_binds_it(shell, code):
    shell.run("e, drawn = 'mine', (i for i in range(9))")
    before = {name: one for name, one in shell.names.items() if name[:1] != "_"}
    line = "%%speedbench --compare baseline,threads:1 --budget 0.05 -v result"
    shell.run(f"{line}\n{code}\nnext(drawn)\n{STEP}")
    after = {name: one for name, one in shell.names.items() if name[:1] != "_"}
    assert after.keys() - before.keys() == {"result"}
    assert not before.keys() - after.keys()
    changed = {name for name, one in before.items() if after[name] is not one}
    assert changed <= {"drawn"}  # which gives first what was drawn from it
    assert list(after["drawn"]) == list(range(9))

"""The names that torch.compile binds in a notebook outlive turns of the event loop, and the end."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from speedkit_jupyter.measure.subject.step import Step
from speedkit_jupyter.measure.undo.handlers.names import Names

pytestmark = pytest.mark.usefixtures("made_time")

SOURCE = """
def work(t):
    global n
    n += 1
    t = t + 1
    seen.append(t.sum().item())  # a graph break
    return t * 2
"""


def test_code_that_a_step_compiles_runs_after_a_turn_and_after_the_end(
    request: pytest.FixtureRequest,
) -> None:
    request.addfinalizer(torch._dynamo.reset)
    torch._dynamo.reset()
    space: dict[str, Any] = {"torch": torch, "n": 0, "seen": [], "__name__": "__main__"}
    exec(SOURCE, space)
    compiled = torch.compile(space["work"], backend="eager")
    space |= {"compiled": compiled, "x": torch.ones(3)}
    code = compile("made = compiled(x)", "cell", "exec")
    step = Step(
        lambda context: exec(code, space),
        [torch.nn.Linear(2, 2)],
        names=space,
        assigned=["made"],
        others=[Names(space, code.co_names)],
    )
    with step.guarded() as visit:
        exec(code, space)
        with visit.paused():
            assert "made" not in space
            assert (space["n"], space["seen"]) == (0, [])
        exec(code, space)
    assert "made" not in space
    assert (space["n"], space["seen"]) == (0, [])
    assert compiled(space["x"]).tolist() == [4.0] * 3

"""Every name means after a panel's measurement what it meant before, however a step binds names."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from types import ModuleType
from typing import Any

import pytest
import torch

from speedkit_jupyter import Panel, session
from speedkit_jupyter.measure.subject.step import Step
from speedkit_jupyter.measure.undo.guard import in_progress
from speedkit_jupyter.measure.undo.handlers.names import Names

pytestmark = pytest.mark.usefixtures("trusted")

WORK = "loss = model(x).sum(); loss.backward(); optimizer.zero_grad()"
WAYS = {
    "exec": "exec('e = made = 1')",
    "globals()": "globals()['e'] = globals()['made'] = 1",
    "globals() in a loop": "for n in 'e', 'made': globals()[f'{n}'] = 1",
    "globals() that updates": "globals().update(e=1, made=1)",
    "globals() that deletes": "globals().pop('e', None)",
    "a function that binds in a loop": "bind_all()",
    "exec in a function": "execute()",
    "a star in a text": "exec('from math import *', globals())",
    "setattr on a module": "setattr(mine, 'e', 1); setattr(mine, 'made', 1)",
    "attributes of a module": "mine.e = mine.made = 1",
    "delattr on a module": "hasattr(mine, 'e') and delattr(mine, 'e')",
}
OF_CELLS = {"a star": "from math import *", "a walrus": "[e := i for i in range(2)]"}
OF_FUNCTIONS = {
    "a global name": "global e, made; e = made = 1",
    "attributes of a module": "mine.e = mine.made = 1",
    "setattr on a module": "setattr(mine, 'e', 1); setattr(mine, 'made', 1)",
}
FUNCTIONS = """
def bind_all():
    for number, name in enumerate(("e", "made", "made2")):
        globals()[name] = number

def execute():
    exec("e = made = 1", globals())
"""


@pytest.fixture
def cells(names: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The notebook's names as a dictionary that code runs in, with `e` and a module."""
    mine = ModuleType("mine")
    mine.__file__, mine.e = "mine.py", "mine"
    monkeypatch.setitem(sys.modules, "mine", mine)
    space = vars(names)
    space.update(__name__="__main__", e="mine", mine=mine, drawn=(i for i in range(9)))
    exec(FUNCTIONS, space)
    return space


def as_cell(space: dict[str, Any], source: str) -> None:
    """The last measured cell, as `%%speedbench` leaves it."""
    code = compile(f"{source}\nnext(drawn)\n{WORK}", "cell", "exec")
    used = Names(space, code.co_names)

    def step() -> Step:
        return Step(
            lambda context: exec(code, space),
            [space["model"]],
            [space["optimizer"]],
            names=space,
            assigned=["loss"],
            others=[used],
            iterators=["drawn"],
        )

    session.current().measured = session.MeasuredCell(source, step)


def as_function(space: dict[str, Any], source: str) -> None:
    body = "\n".join(f"    {line}" for line in f"{source}\nnext(drawn)\n{WORK}".splitlines())
    exec(f"def step():\n{body}", space)


def measured(space: dict[str, Any], step: str | None, cell: Any = None) -> Panel:
    """Run the event loop until Measure has ended; `cell` runs once, in the first pause."""
    panel = Panel(space["model"], step=step, budget_s=0.1)
    waiting = [cell] if cell else []

    async def main() -> None:
        panel.buttons["Measure"].click()
        while not panel.buttons["Stop"].disabled:
            await asyncio.sleep(0)
            if waiting and "round" in panel.status.value:
                waiting.pop()()

    asyncio.run(main())
    assert panel.result is not None, panel.status.value
    assert not waiting
    return panel


def meanings(space: dict[str, Any]) -> dict[str, Any]:
    own = {f"mine.{name}": one for name, one in vars(space["mine"]).items()}
    return {**space, **own}


KINDS = [("cell", code) for code in (WAYS | OF_CELLS).values()]
KINDS += [("function", code) for code in OF_FUNCTIONS.values()]


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("kind", "source"), KINDS)
def test_every_name_means_what_it_meant_however_the_step_binds_it(cells, kind, source):
    (as_cell if kind == "cell" else as_function)(cells, source)
    before = meanings(cells)
    measured(cells, None if kind == "cell" else "step")
    after = meanings(cells)
    assert after.keys() == before.keys()
    changed = {name for name, one in before.items() if after[name] is not one}
    assert changed <= {"drawn"}  # which gives first what was drawn from it
    assert list(after["drawn"]) == list(range(9))


@pytest.mark.checked
@pytest.mark.usefixtures("every_round_drawn")
def test_what_another_cell_binds_meanwhile_stays(cells):
    as_cell(cells, WAYS["globals()"])
    seen = []

    def another() -> None:
        seen.append((cells["e"], "made" in cells))
        cells.update(result=torch.ones(1), made="the other cell's")
        del cells["y"]

    measured(cells, None, another)
    assert seen == [("mine", False)]  # nothing of the step's shows in a pause
    assert "y" not in cells
    assert (cells["e"], cells["made"]) == ("mine", "the other cell's")
    assert cells["result"].item() == 1


def test_names_that_no_code_of_the_step_can_bind_are_left_to_other_threads(cells):
    def elsewhere() -> None:
        while in_progress() is None:
            time.sleep(0.001)
        time.sleep(0.03)
        cells["theirs"] = 1

    as_function(cells, "pass")
    thread = threading.Thread(target=elsewhere)
    thread.start()
    measured(cells, "step")
    thread.join()
    assert cells["theirs"] == 1

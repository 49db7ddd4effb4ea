"""An error in the user's code looks as it does without the magic, plus one line from SpeedKit."""

import re
import traceback

import pytest
import torch

HELPERS = """
from queue import SimpleQueue
class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
    def forward(self, batch):
        return self.layer(batch) @ self.layer(batch)
class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        raise ValueError("in a data set")
class Sealed(Exception):
    def __setattr__(self, name, value):
        if name[:2] != "__":
            raise TypeError("sealed")
        super().__setattr__(name, value)
class Kin(__import__("speedkit_jupyter").SpeedKitError):
    pass
broken, loader = Broken(), torch.utils.data.DataLoader(Items(), batch_size=2)
calls = SimpleQueue()
"""
TRAIN = "loss = model(x).sum()\nloss.backward()\noptimizer.step()\n"
KINDS = {
    "its own": TRAIN + "raise ValueError('mine')",
    "sealed": TRAIN + "raise Sealed('mine')",
    "of our kin": TRAIN + "raise Kin('mine')",
    "in forward": "broken(torch.rand(4, 4)).sum().backward()",
    "in a loader": "for batch in loader:\n    model(batch)",
    "in a closure": "optimizer.step(lambda: model(x).sum().backward() or 1 / 0)",
    "a reason": TRAIN + "try: 1 / 0\nexcept Exception as error: raise KeyError from error",
    "its second step": TRAIN + "calls.put(1)\nif calls.qsize() > 1: raise ValueError('mine')",
}  # fmt: skip
WAYS = ("", "--compare baseline,bf16 --budget 0.1", "--tune --fresh --budget 0.1", "verify")


def frames(error):
    """Return source lines of user and library frames, except module calls, which hooks change."""
    every = traceback.extract_tb(error.__traceback__)
    start = next(i for i, one in enumerate(every) if "site-packages/IPython" not in one.filename)
    ours = [i for i, one in enumerate(every) if "speedkit_jupyter" in one.filename]
    found = every[max([start, *(one + 1 for one in ours)]) :]
    assert found
    lines = (one.line for one in found if not one.filename.endswith("nn/modules/module.py"))
    return list(dict.fromkeys(lines))


def run(shell, way, source):
    if way != "verify":
        return shell._run(f"%%speedbench {way}\n{source}")
    shell.run("def train():\n" + "".join(f"    {line}\n" for line in source.splitlines()))
    return shell._run("%speedkit verify --step train --steps 2")


@pytest.mark.sampled(18)
@pytest.mark.parametrize(("kind", "way"), [
    pytest.param(kind, way, marks=[pytest.mark.slow] * (kind != "its own" and way != WAYS[1]))
    for kind in KINDS for way in WAYS
])  # fmt: skip
def test_it_shows_the_users_frames_and_one_line_of_ours(shell, kind, way):
    shell.run(HELPERS)
    before = [p.clone() for p in shell.names["model"].parameters()]
    result, shown = run(shell, way, KINDS[kind])
    error = result.error_in_exec
    assert "speedkit_jupyter" not in shown
    assert shown.rstrip().endswith("has put back the step's changes.)")
    assert all(map(torch.equal, before, shell.names["model"].parameters()))
    assert not shell.names["optimizer"].state
    plain = shell.fails(KINDS[kind])
    assert type(error) is type(plain)
    assert frames(error) == frames(plain)


@pytest.mark.smoke
@pytest.mark.parametrize("way", WAYS)
def test_an_interrupt_is_one_line_and_stops_the_notebook(shell, way):
    result, shown = run(shell, way, TRAIN + "raise KeyboardInterrupt")
    assert isinstance(result.error_in_exec, KeyboardInterrupt)
    assert shown.strip() == "KeyboardInterrupt: stopped; everything is as before"
    assert not shell.names["optimizer"].state


@pytest.mark.smoke
@pytest.mark.parametrize("way", WAYS)
def test_the_end_of_the_data_is_one_line_that_says_so(shell, way):
    result, shown = run(shell, way, TRAIN + "next(iter([]))")
    assert "ran out of data (StopIteration)" in str(result.error_in_exec)
    assert len(shown.strip().splitlines()) <= 1


COLOURS = re.compile(r"\x1b\[[\d;]*m")
# Marks the end of each line that an arrow should point at.
HERE = "  # here"
CELLS = {
    "a middle line": f"a = 1\n1 / 0{HERE}\nb = 2",
    "after empty lines": f"\n\n1 / 0{HERE}",
    "a statement of several lines": f"a = [\n    1,\n    1 / 0,{HERE}\n]",
    "a function of this cell": f"def f(a):\n    return a / 0{HERE}\n\n\nf(1){HERE}",
    "a class body": f"a = 1\nclass A:{HERE}\n    b = 1\n    c = 1 / 0{HERE}",
    "a function of an earlier cell": f"a = 1\nearly(){HERE}",
    "within a module": f"import json\njson.loads('{{'){HERE}",
    "a magic before": f"%time a = 1\n1 / 0{HERE}",
}
UNDER = (
    "%%speedbench -n 1 -r 1 -v kept",
    "%%speedbench --compare baseline,bf16 --budget 0.1 --model model -q",
    "%%speedbench --tune --fresh --budget 0.1 --model model",
)
# How newer and older IPython name a cell.
CELL = r"(?:Cell In\[{0}\], line|<ipython-input-{0}-[0-9a-f]+> in)"


def arrows(shown, number):
    """Return the number and text of each line that an arrow marks in frames of this cell."""
    found, inside = set(), False
    for line in shown.splitlines():
        if re.match(r"(Cell In|<ipython-input-|File |/|~|\S+Error)", line):
            inside = re.match(CELL.format(number), line) is not None
        if inside and (arrow := re.match(r"-+> *(\d+) ?(.*)", line)):
            found.add((int(arrow[1]), arrow[2].partition(HERE)[0].strip()))
    return found


@pytest.mark.smoke
@pytest.mark.sampled(18)
@pytest.mark.parametrize("way", UNDER)
@pytest.mark.parametrize("kind", CELLS)
def test_arrows_point_at_the_notebooks_own_lines(shell, kind, way):
    from IPython.utils.capture import capture_output

    shell.ip.run_cell("def early():\n    a = 1\n    raise KeyError('early')", store_history=True)
    cell = f"{way}\n{CELLS[kind]}"
    with capture_output() as captured:
        result = shell.ip.run_cell(cell, store_history=True)
    assert not result.success
    marked = ((i, line) for i, line in enumerate(cell.splitlines(), 1) if line.endswith(HERE))
    expected = {(i, line.removesuffix(HERE).strip()) for i, line in marked}
    assert arrows(COLOURS.sub("", captured.stdout), result.execution_count) == expected

"""An error of the user's own code looks as it would without the magic, with one line of ours.

Of every kind, under everything that runs a step; and the state is as before.
"""

from __future__ import annotations

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
class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, batch):
        return batch * 2
    @staticmethod
    def backward(ctx, grad):
        raise ValueError("in backward")
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
    "in backward": TRAIN + "Double.apply(model(x)).sum().backward()",
    "in a closure": (
        "def closure():\n    optimizer.zero_grad()\n    loss = Double.apply(model(x)).sum()\n"
        "    loss.backward()\n    return loss\noptimizer.step(closure)"
    ),
    "a reason": TRAIN + "try: 1 / 0\nexcept Exception as error: raise KeyError from error",
    "its second step": TRAIN + "calls.put(1)\nif calls.qsize() > 1: raise ValueError('mine')",
}  # fmt: skip
WAYS = ("", "--compare baseline,bf16 --budget 0.1", "--tune --fresh --budget 0.1", "verify")


def frames(error):
    """Of the user's own code and of libraries; torch's calls of modules differ where hooks are."""
    every = traceback.extract_tb(error.__traceback__)
    start = next(i for i, one in enumerate(every) if "site-packages/IPython" not in one.filename)
    ours = [i for i, one in enumerate(every) if "speedkit_jupyter" in one.filename]
    found = every[max([start, *(one + 1 for one in ours)]) :]
    assert found
    return list(
        dict.fromkeys(
            one.line for one in found if not one.filename.endswith("nn/modules/module.py")
        )
    )


def run(shell, way, source):
    if way != "verify":
        return shell._run(f"%%speedbench {way}\n{source}")
    shell.run("def train():\n" + "".join(f"    {line}\n" for line in source.splitlines()))
    return shell._run("%speedkit verify --step train --steps 2")


@pytest.mark.sampled(18)
@pytest.mark.parametrize(
    ("kind", "way"),
    [
        pytest.param(
            kind, way, marks=[] if kind == "its own" or way == WAYS[1] else pytest.mark.slow
        )
        for kind in KINDS
        for way in WAYS
    ],
)
def test_it_shows_the_users_frames_and_one_line_of_ours(shell, kind, way):
    shell.run(HELPERS)
    before = [p.clone() for p in shell.names["model"].parameters()]
    result, shown = run(shell, way, KINDS[kind])
    error = result.error_in_exec
    assert "speedkit_jupyter" not in shown
    assert shown.rstrip().endswith("has put back what the step changed.)")
    assert all(map(torch.equal, before, shell.names["model"].parameters()))
    assert not shell.names["optimizer"].state
    plain = shell.fails(KINDS[kind])
    assert type(error) is type(plain)
    assert frames(error) == frames(plain)


@pytest.mark.smoke
@pytest.mark.parametrize("way", WAYS[:3])
def test_lines_are_numbered_as_in_the_notebooks_cell(shell, way):
    _, shown = shell._run(f"%%speedbench {way}\nout = model(x)\nnowhere")
    assert "----> 3 nowhere" in shown
    assert "      2 out = model(x)" in shown


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


def test_an_error_that_only_a_variant_has_is_a_row_and_not_an_error(shell):
    shown = shell.run(
        "%%speedbench --compare baseline,bf16 --budget 0.1\nout = model(x)\n"
        "if torch.is_autocast_enabled('cpu'): raise ValueError('only here')"
    )
    assert "ValueError" in shown

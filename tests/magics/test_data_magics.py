"""%speedkit loader, batch and free as a user types them."""

from __future__ import annotations

import pytest
import torch
from IPython.core.error import UsageError
from torch.utils.data import DataLoader

LOADER = """
from torch.utils.data import DataLoader, TensorDataset
train_loader = DataLoader(TensorDataset(x, y), batch_size=2, shuffle=True)
def train(images, labels):
    loss_fn(model(images), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
def epoch():
    for images, labels in train_loader:
        train(images, labels)
"""


def values(shell):
    return [one.detach().clone() for one in shell.names["model"].parameters()]


@pytest.mark.real_time
@pytest.mark.smoke
@pytest.mark.parametrize("step", ["train", "epoch"])
def test_a_loader_is_measured_with_the_step_and_given_back_as_a_loader(shell, step):
    shell.run(LOADER)
    before = values(shell)
    shown = shell.run(f"%speedkit loader train_loader --step {step} --budget 2 -v quick")
    assert f"`{step}`" in shown
    assert "0 workers" in shown
    assert "as it is" in shown
    quick = shell.names["quick"]
    assert isinstance(quick, DataLoader)
    torch.manual_seed(3)
    own = [labels.tolist() for _, labels in shell.names["train_loader"]]
    torch.manual_seed(3)
    assert [labels.tolist() for _, labels in quick] == own
    assert all(map(torch.equal, before, values(shell)))


@pytest.mark.real_time
def test_the_only_loader_needs_no_name_and_the_last_cell_is_the_step(shell):
    shell.run(LOADER)
    shell.run("%%speedbench -n1 -r1\nepoch()")
    shown = shell.run("%speedkit loader --budget 1")
    assert "epoch()" in shown


def test_two_loaders_are_asked_about_and_none_is_said(shell):
    assert "there is no DataLoader" in str(shell.fails("%speedkit loader"))
    shell.run(LOADER + "other = DataLoader(TensorDataset(x))")
    error = shell.fails("%speedkit loader")
    assert isinstance(error, UsageError)
    assert "which one? train_loader, other" in str(error)
    assert "model" in str(shell.fails("%speedkit loader model"))


@pytest.mark.parametrize("line", ["--step train --data x,y", "--step train --loader train_loader"])
def test_batch_sizes_stand_in_a_table_with_the_knee_and_change_nothing(shell, line):
    shell.run(LOADER)
    before = values(shell)
    shown = shell.run(f"%speedkit batch {line} --range 4:32 --budget 2 -v sizes")
    assert "samples a second" in shown
    assert "Another batch size is another training" in " ".join(shown.split())
    found = shell.names["sizes"]
    assert [one.number for one in found.sizes] == [4, 8, 16, 32]
    assert found.fastest.rate >= found.knee.rate > 0
    assert all(map(torch.equal, before, values(shell)))
    assert shell.names["x"].shape[0] == 8


def test_batch_sizes_of_the_last_cell(shell):
    shell.run("%%speedbench -n1 -r1\nloss_fn(model(x), y).backward()")
    shown = shell.run("%speedkit batch --range 4:8 --budget 1")
    assert "samples a second" in shown


WRONG = {
    "%speedkit batch": "which step? Run a %%speedbench cell before",
    "%speedkit batch --range 8": "8 is no range of sizes: give one as in 8:4096",
    "%speedkit batch --range 9:3": "9:3 is no range of sizes",
    "%speedkit batch --step train --data nothing": "nothing",
    "%speedkit batch --step gone": "gone",
    "%speedkit loader train_loader --step gone": "gone",
    "%speedkit loader train_loader -v 1a": "1a",
    "%%speedbench --tune --within 1.2\nepoch()": "within belongs to the objective memory",
    "%%speedbench --tune --objective memory --within 0.5\nepoch()": "1 or more",
}


@pytest.mark.parametrize("line", list(WRONG))
def test_a_line_that_cant_be_meant_is_one_line(shell, line):
    shell.run(LOADER)
    error = shell.fails(line)
    assert isinstance(error, UsageError)
    assert WRONG[line] in str(error)
    assert "\n" not in str(error)


@pytest.mark.smoke
def test_free_names_what_an_error_holds_and_lets_go_of_it(shell):
    shell.fails("def run():\n    held = torch.zeros(1_000_000)\n    raise ValueError\nrun()")
    shown = shell.run("%speedkit free")
    assert "the last error" in shown
    assert "3.81 MiB" in shown
    assert "3.81 MiB" not in shell.run("%speedkit free")


def test_free_touches_no_name_of_the_users(shell):
    shell.run("kept = torch.ones(1_000_000)")
    shell.run("%speedkit free")
    assert shell.names["kept"].sum() == 1_000_000

"""%speedkit loader, batch and free as a user types them."""

import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from speedkit_jupyter.extras.data.free import variables_table

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
    shown = shell.run(f"%speedkit loader train_loader --step {step} --budget 1 -v quick")
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


LINES = ("", "--step train --data x,y", "--step train --loader train_loader")


@pytest.mark.parametrize("line", LINES)
def test_batch_sizes_are_in_a_table_and_change_nothing(shell, line):
    shell.run(LOADER)
    if not line:  # the last cell goes through its loader
        shell.run("%%speedbench -n1 -r1\nepoch()")
    before = values(shell)
    shown = shell.run(f"%speedkit batch {line} --range 4:32 --budget 1 -v sizes")
    assert "samples a second" in shown
    assert "Another batch size is another training" in " ".join(shown.split())
    found = shell.names["sizes"]
    assert [one.number for one in found.sizes] == [4, 8, 16, 32]
    assert found.fastest.rate >= found.knee.rate > 0
    assert all(map(torch.equal, before, values(shell)))
    assert shell.names["x"].shape[0] == 8


@pytest.mark.smoke
def test_free_releases_errors_outputs_and_masks_and_keeps_variables(shell):
    shell.run("from speedkit_jupyter import attention\n_ = 'mine'\nx * 2")
    shell.run("attention(*[torch.rand(1, 1, 99, 8)] * 3, 'sliding_window', window=3)")
    shell.run("import weakref\nkept = torch.ones(1_000_000)\nclass Out: 'a model returns it'")
    failing = "held = torch.zeros(9)\n    gone = weakref.ref(held)\n    raise ValueError"
    shell.fails(f"def run():\n    global gone\n    {failing}\nrun()")
    assert shell.names["gone"]() is not None
    shown = shell.run("%speedkit free")
    assert shell.names["gone"]() is None
    for part in ("the last error", "1 output (Out, _)", "masks of attention()", "kept  3.81 MiB"):
        assert part in shown
    assert "nothing was held but by your variables" in shell.run("%speedkit free")
    assert not shell.names["_oh"]
    assert shell.names["_"] == "mine"
    assert shell.names["kept"].sum() == 1_000_000


class Dead:
    pass


def test_variables_are_listed_with_their_memory_and_their_graphs() -> None:
    net, small = nn.Linear(512, 1024), nn.Linear(4, 4)
    losses = [small(torch.ones(2, 4)).sum() for _ in range(3)]
    names = {"losses": losses, "net": net, "small": small, "dead": weakref.proxy(Dead())}
    rows = [row.cells for row in variables_table(names).rows]
    assert rows[0] == ("net", "2 MiB", "–")
    assert rows[1][0] == "losses"
    assert rows[1][2].startswith("3 tensors with a graph")
    assert len(rows) == 2

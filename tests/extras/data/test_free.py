"""%speedkit free releases memory that no user variable holds; variables are listed, not touched."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from speedkit_jupyter.extras.data.free import variables_table


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

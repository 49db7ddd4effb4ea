"""%speedkit advise as a user types it."""

import pytest
from IPython.core.error import UsageError

FROZEN = """
body, head = nn.Linear(256, 1024), nn.Linear(1024, 4)
net = nn.Sequential(body, head)
trained = torch.optim.SGD(head.parameters(), lr=0.1)
points, kinds = torch.randn(256, 256), torch.randint(4, (256,))
def step():
    loss = loss_fn(net(points), kinds)
    trained.zero_grad()
    loss.backward()
    trained.step()
"""
LINE = "%speedkit advise --step step --budget 2 -v advice"


# A clock on which both calls take the same time would refute the remedy.
@pytest.mark.real_time
@pytest.mark.smoke
def test_what_is_slow_stands_with_evidence_and_is_tried_by_its_number_or_its_rule(shell):
    shell.run(FROZEN)
    before = {name: one.clone() for name, one in shell.ip.ev("net").state_dict().items()}
    shown = shell.run(LINE)
    found = next(
        number
        for number, one in enumerate(shell.names["advice"].opportunities, 1)
        if one.rule == "frozen_gradients"
    )
    assert "2 parameters require gradients, and no optimizer holds them" in shown.replace("\n", " ")
    assert f"--try {found}" in " ".join(shown.split())
    for wanted in (found, "frozen_gradients"):
        assert "frozen_gradients" in shell.run(
            f"%speedkit advise --try {wanted} --budget 2 -v tried"
        )
        rows = shell.names["tried"].rows()
        assert [row["name"] for row in rows] == ["baseline", "frozen_gradients"]
        # Unread results are not compared; on a busy machine no check is worth its time.
        assert rows[1]["accuracy"] in ("exact", None)
    assert all(one.requires_grad for one in shell.names["net"].parameters())
    after = shell.ip.ev("net").state_dict()
    assert all(one.equal(after[name]) for name, one in before.items())


def test_what_was_not_found_cant_be_tried(shell):
    shell.run(FROZEN)
    shell.run(LINE)
    for wanted in (99, "padding"):
        error = shell.fails(f"%speedkit advise --try {wanted}")
        assert isinstance(error, UsageError)
        assert f"there is no {wanted}: 1 or " in str(error)
    # Of another step it looks for what is slow first.
    shell.run("def other():\n    step()")
    error = shell.fails("%speedkit advise --step other --try padding --budget 1")
    assert "there is no padding: 1 or " in str(error)


def test_a_step_that_takes_batches_gets_them_from_the_loader_that_is_named(shell):
    shell.run(
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "net = nn.Linear(8, 2)\n"
        "trained = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "pairs = TensorDataset(torch.rand(64, 8), torch.randint(2, (64,)))\n"
        "loader = DataLoader(pairs, batch_size=8)\n"
        "def train(x, y):\n"
        "    trained.zero_grad()\n"
        "    loss_fn(net(x), y).backward()\n"
        "    trained.step()\n"
        "def by_one(batch):\n"
        "    train(*batch)\n"
    )
    for name in ("train", "by_one"):
        shell.run(f"%speedkit advise --step {name} --loader loader --budget 1 -v advice")
        assert shell.names["advice"].profile.steps == 8
    error = shell.fails("%speedkit advise --step train --budget 1")
    assert "train takes 2 arguments: name its DataLoader by --loader" in str(error)

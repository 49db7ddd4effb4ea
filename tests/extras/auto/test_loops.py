"""Kinds of loops, and the cells that hold them."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from speedkit_jupyter.extras.auto import plugin
from speedkit_jupyter.extras.auto.report import summary

LOOP = """
import torch
net = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for number in range(8):
    optimizer.zero_grad()
    net(torch.ones(3, 4)).sum().backward()
    optimizer.step()
"""


@pytest.fixture
def shell(monkeypatch):
    from IPython.testing.globalipapp import get_ipython

    ip = get_ipython()
    before = dict(ip.user_ns)
    ip.run_line_magic("load_ext", "speedkit_jupyter")
    yield ip
    plugin.off()
    ip.run_line_magic("unload_ext", "speedkit_jupyter")
    for name in ip.user_ns.keys() - before:
        del ip.user_ns[name]


class Writer(nn.Module):
    """A language model of one layer that generates as libraries do: a call for each token."""

    def __init__(self, clock):
        super().__init__()
        self.embedding, self.head, self.clock = nn.Embedding(11, 8), nn.Linear(8, 11), clock

    def forward(self, tokens):
        self.clock.sleep(0.01 if torch.is_autocast_enabled("cpu") else 0.02)
        return self.head(self.embedding(tokens))

    @torch.no_grad()
    def generate(self, tokens, length):
        for _ in range(length):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], 1)
        return tokens


def test_generating_between_steps_is_evaluation_and_makes_no_step(made_time, running):
    torch.manual_seed(0)
    net = Writer(made_time)
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    expected = net.generate(torch.zeros(1, 1, dtype=torch.long), 5)
    for number in range(60):
        optimizer.zero_grad()
        net(torch.randint(11, (4, 6))).sum().backward()
        optimizer.step()
        if number % 10 == 0:
            assert net.generate(torch.zeros(1, 1, dtype=torch.long), 5).equal(expected)
    (work,) = running.works
    assert work.trains
    assert sum(work.totals.steps.values()) == 57


def test_steps_that_are_written_by_hand_run_as_they_are_and_one_line_says_why(made_time, running):
    net = nn.Linear(4, 2)
    for _ in range(20):
        net.zero_grad()
        net(torch.rand(3, 4)).sum().backward()
        for parameter in net.parameters():
            parameter.data -= 0.01 * parameter.grad
    assert not running.works
    assert running.end_cell() == [
        "auto leaves this loop as it is: no optimizer of torch makes its steps."
    ]


def test_a_known_loop_is_known_in_the_next_cell(made_time, running):
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(2):
        running.begin_cell()
        for _ in range(20):
            optimizer.zero_grad()
            net(torch.rand(3, 4)).sum().backward()
            optimizer.step()
        assert not any("leaves this loop" in line for line in running.end_cell())


def test_training_by_torch_func_runs_as_it_is_and_one_line_says_why(made_time, running):
    net = nn.Linear(4, 2)
    parameters = dict(net.named_parameters())
    for _ in range(5):
        torch.func.grad(
            lambda given: torch.func.functional_call(net, given, (torch.rand(3, 4),)).sum()
        )(parameters)
    assert not running.works
    assert "torch.func" in running.end_cell()[0]


def test_a_program_reads_of_functions_and_a_notebook_of_magics(loop, running):
    _, _, train = loop
    train(600)
    assert "%speedkit code" in summary(running.latest)
    assert "tuned(model, optimizer)" in summary(running.latest, in_notebook=False)
    assert "%" not in summary(running.latest, in_notebook=False).replace(" %", "")


@pytest.mark.parametrize("is_on", [False, True])
@pytest.mark.parametrize("error", ["1 / 0", "raise KeyboardInterrupt"])
def test_a_cell_that_raises_shows_the_users_lines_only(shell, capsys, error, is_on):
    if is_on:
        shell.run_cell("%speedkit auto")
    capsys.readouterr()
    result = shell.run_cell(f"%%speedkit\ndef mine():\n    {error}\nmine()")
    assert not result.success
    shown = re.sub(r"\x1b\[[\d;]*m", "", "".join(capsys.readouterr()))
    assert shown.count("Traceback (most recent call last)") == 1
    assert f"----> 2     {error}" in shown
    assert "speedkit_jupyter" not in shown
    assert "run_cell_magic" not in shown


@pytest.mark.slow
def test_a_cell_that_several_processes_run_is_left_to_them(shell, capsys):
    from speedkit_jupyter.extras.processes import workers

    shell.run_cell("%speedkit auto")
    try:
        result = shell.run_cell(f"%%speedkit launch\n{LOOP}\nprint('trained', number)")
    finally:
        workers.stop()
    shown = capsys.readouterr().out
    assert result.success, shown
    assert "trained 7" in shown
    assert not plugin._RUNNING[0].auto.works

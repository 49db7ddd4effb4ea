"""Public functions report a bad argument in one line, with the package's inner frames hidden."""

import linecache
from traceback import walk_tb
from types import SimpleNamespace
from typing import Any

import IPython
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import speedkit_jupyter as sk
from speedkit_jupyter.support import tracebacks
from speedkit_jupyter.support.source_lines import Spot, is_users, place

MODEL = torch.nn.Linear(4, 4)
BAD: dict[str, Any] = {
    "none": None, "true": True, "five": 5, "negative": -1, "nan": float("nan"), "huge": 10**400,
    "text": "x\x1b[1m\ny", "empty": "", "list": [], "mixed": ["baseline", None],
    "type": type(None), "object": object(),
}  # fmt: skip


def step() -> torch.Tensor:
    return MODEL(torch.ones(1, 4)).sum()


def frames_of_ours(traceback: Any) -> set[Any]:
    """Return the code objects of the package's frames in a traceback."""
    frames = [frame for frame, _ in walk_tb(traceback)]
    return {one.f_code for one in frames if one.f_globals["__name__"].startswith(sk.__name__)}


# Each argument has a call that passes a value for it, and the kinds of BAD that are valid there.
CALLS: dict[str, tuple[Any, str]] = {
    "step": (lambda bad: sk.benchmark(bad), ""),
    "variants": (lambda bad: sk.benchmark(step, bad), ""),
    "budget_s": (lambda bad: sk.benchmark(step, "?", budget_s=bad), ""),
    "model": (lambda bad: sk.benchmark(step, "baseline", model=bad), "none"),
    "optimizer": (lambda bad: sk.benchmark(len, "baseline", optimizer=bad), ""),
    "tune step": (lambda bad: sk.tune(bad), ""),
    "tune budget_s": (lambda bad: sk.tune(step, budget_s=bad), "none five"),
    "verify plan": (lambda bad: sk.verify(step, bad), ""),
    "verify steps": (lambda bad: sk.verify(len, steps=bad), ""),
    "from_yaml path": (lambda bad: sk.SpeedConfig.from_yaml(bad), ""),
    "from_dict": (lambda bad: sk.SpeedConfig.from_dict(bad), ""),
    "from_json source": (lambda bad: sk.Hardware.from_json(bad), ""),
    "plan config": (lambda bad: sk.plan(bad), "none"),
    "plan hardware": (lambda bad: sk.plan(hardware=bad), "none"),
    "plan facts": (lambda bad: sk.plan(facts=bad), "none"),
    "apply model": (lambda bad: sk.apply_speedups(bad), ""),
    "apply config": (lambda bad: sk.apply_speedups(MODEL, bad), "none"),
    "apply optimizer": (lambda bad: sk.apply_speedups(MODEL, optimizer=bad), "none list empty"),
    "autocast context": (lambda bad: sk.autocast_context(bad), ""),
    "code plan": (lambda bad: sk.code(bad), ""),
    "code form": (lambda bad: sk.code(sk.plan(), bad), ""),
}


@pytest.mark.parametrize("argument", CALLS)
def test_an_argument_of_the_wrong_kind_is_named_in_one_line(argument):
    call, takes = CALLS[argument]
    for kind, bad in BAD.items():
        if kind not in takes.split():
            with pytest.raises((sk.SpeedKitError, TypeError, ValueError)) as raised:
                call(bad)
            line = str(raised.value)
            assert line.isprintable(), (kind, line)
            assert line, kind
            assert frames_of_ours(raised.tb) <= tracebacks._GATES, (kind, line)


def test_the_name_of_an_accelerator_commands_no_terminal():
    machine = '{"accelerators": [{"kind": "cuda", "name": "T4\\u001b[31m\\nx"}]}'
    assert sk.Hardware.from_json(machine).accelerators[0].name == r"T4\x1b[31m\nx"


NET = nn.Linear(4, 2)
X = torch.randn(8, 4)


def _contrast(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(NET(x) @ NET(x).T, torch.arange(len(x)))


WRONG = {
    "advise": lambda: sk.advise(lambda: None, budget_s=-1),
    "batch_sizes": lambda: sk.batch_sizes(lambda: None, budget_s="long"),
    "micro_batch": lambda: sk.micro_batch(_contrast, 2)(X),
    "profile": lambda: sk.profile(3),
    "tune": lambda: sk.tune(lambda: NET(X), keep="money"),
    "tune_loader": lambda: sk.tune_loader(DataLoader([1, 2]), lambda: None, budget_s=1),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_shows_the_users_line_and_one_of_ours_at_most(name):
    with pytest.raises((sk.SpeedKitError, TypeError)) as caught:
        WRONG[name]()
    assert frames_of_ours(caught.tb) <= tracebacks._GATES


@pytest.mark.parametrize(
    "where", ["there/site-packages/torch", "there/dist-packages/more", "src/torch"]
)
def test_libraries_are_no_lines_of_the_users_wherever_they_are(where, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "__path__", [str(tmp_path / "src" / "torch")])
    is_users.cache_clear()
    try:
        assert not is_users(str(tmp_path / where / "nn" / "functional.py"))
        assert is_users(str(tmp_path / "src" / "train.py"))
    finally:
        is_users.cache_clear()


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("<ipython-input-3-47971f8a1956>", "cell 3, line 2"),  # IPython 7 in a terminal
        ("/tmp/ipykernel_1/123.py", "cell 2, line 2"),  # IPython 7 under ipykernel
        ("/home/user/train.py", "train.py, line 2"),
    ],
)
def test_a_line_of_a_cell_is_named_by_the_cells_number_in_ipython_7(file, expected, monkeypatch):
    code = "x = 1\ny = x.item()"
    history = SimpleNamespace(input_hist_parsed=["", "x = 1", code, "print(x)"])
    shell = SimpleNamespace(compile=object(), history_manager=history)
    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    lines = [f"{line}\n" for line in code.splitlines()]
    monkeypatch.setitem(linecache.cache, "/tmp/ipykernel_1/123.py", (20, None, lines, "123.py"))
    assert place(Spot(file, 2)) == expected

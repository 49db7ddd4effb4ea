"""One object in the notebook that answers no question must not keep a magic from working."""

from __future__ import annotations

import warnings

import pytest

pytestmark = pytest.mark.usefixtures("made_time")


def refuses(self, *given):
    raise RuntimeError("settings are not configured")


def a_class(**members):
    return type("Lazy", (), members)


STUBBORN = a_class(
    **dict.fromkeys(("__getattribute__", "__eq__", "__hash__", "__repr__", "__len__"), refuses),
    **dict.fromkeys(("__bool__", "__iter__", "__call__", "__reduce_ex__"), refuses),
    **dict.fromkeys(("__class__", "__dict__"), property(refuses)),
)
LINES = ("status", "apply model", "apply model --optimizer optimizer", "report", "code model", "")
BENCH = "--compare baseline,fused_optimizer --budget 0.05 -v found --model model"


HELD = {"name": "stranger = one", "attribute": "stranger = types.SimpleNamespace(one=one)",
        "element": "stranger = [one, {'a': one}]"}  # fmt: skip


@pytest.mark.parametrize("place", HELD)
def test_a_stranger_breaks_no_magic(shell, place):
    shell.run("import types\ndef train():\n    model(x).sum().backward(); optimizer.step()")
    shell.names["one"] = STUBBORN.__new__(STUBBORN)
    shell.run(HELD[place])
    for line in LINES:
        shell.run(f"%speedkit {line}")
    shell.run("%speedkit restore")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shown = shell.run(f"%%speedbench {BENCH}\nstranger\ntrain()")
    assert "fused_optimizer" in shown

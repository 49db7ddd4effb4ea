"""An importer in `sys.meta_path` that raises is harmless, or ends a measurement in one line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
from torch import nn

from speedkit_jupyter import SpeedKitError, StepError, benchmark
from speedkit_jupyter.machines import probes
from speedkit_jupyter.machines.probes import installed
from speedkit_jupyter.support.importers import in_the_way
from speedkit_jupyter.support.tracebacks import lets_go


class Raising:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def find_spec(self, *arguments: Any) -> None:
        raise self.error


class Helped(Raising):
    def find_spec(self, *arguments: Any) -> None:
        self.helper()

    def helper(self) -> None:
        raise self.error


class OfClass:
    @classmethod
    def find_spec(cls, *arguments: Any) -> None:
        raise RuntimeError("boom")


class Strange:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


class Distributing:
    find_spec = staticmethod(lambda *arguments: None)

    def find_distributions(self, *arguments: Any) -> Any:
        raise RuntimeError("boom")


KINDS = {
    "raising": lambda: Raising(RuntimeError("boom")),
    "raising an ImportError": lambda: Raising(ImportError("boom")),
    "raising a KeyError": lambda: Raising(KeyError("boom")),
    "raising in a helper": lambda: Helped(ValueError("boom")),
    "a class": lambda: OfClass,
    "without a method": object,
    "with strange attributes": Strange,
    "with strange distributions": Distributing,
}


@pytest.fixture(autouse=True)
def whole():
    before = [*sys.meta_path]
    yield
    sys.meta_path[:] = before


@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_installed_can_be_asked(kind, place):
    importer = KINDS[kind]()
    sys.meta_path.insert(0 if place == "first" else len(sys.meta_path), importer)
    assert probes.has_triton() in (True, False)
    assert isinstance(installed(["torch", "nowhere"]), dict)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("when", ["before", "in the step"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_benchmark_ends_with_a_result_or_in_a_line(kind, when):
    model, x = nn.Linear(2, 2), torch.rand(1, 2)
    importer, expected = KINDS[kind](), [*sys.meta_path]

    def step() -> Any:
        if when == "in the step":
            sys.meta_path.insert(0, importer)
        return model(x)

    if when == "before":
        sys.meta_path.insert(0, importer)
        expected.insert(0, importer)
    words = "one line"
    try:
        benchmark(step, "baseline,bf16", budget_s=0.05)
    except SpeedKitError as error:
        words = str(error)
    assert len(words.splitlines()) == 1
    assert all(a is b for a, b in zip(sys.meta_path, expected, strict=True))


@pytest.mark.parametrize(
    "kind", ["raising", "raising an ImportError", "raising in a helper", "a class"]
)
def test_an_import_of_ours_that_fails_by_it_names_it(kind):
    @lets_go
    def ours() -> None:
        import nothing_of_this_name  # noqa: F401

    sys.meta_path.insert(0, KINDS[kind]())
    with pytest.raises(StepError, match=r"importer in sys.meta_path .*find_spec raises .*boom"):
        ours()


def test_other_errors_are_nobodys():
    for error in (KeyboardInterrupt(), ValueError("x"), ImportError("x")):
        with pytest.raises(type(error)) as caught:
            raise error
        assert in_the_way(caught.value) == ""
    with pytest.raises(ModuleNotFoundError) as found:
        import nothing_of_this_name  # noqa: F401
    assert in_the_way(found.value) == ""


PROGRAM = """
import sys
import torch
from torch import nn
from speedkit_jupyter import SpeedKitError, benchmark, tune, verify

class Broken:
    def find_spec(self, *arguments):
        raise RuntimeError("boom")

broken = Broken()
model, x = nn.Linear(2, 2), torch.rand(1, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
weight = model.weight.detach().clone()
def step():
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss
sys.meta_path.insert({place}, broken)
for run in (
    lambda: benchmark(step, "baseline,bf16,fused_optimizer", budget_s=0.3),
    lambda: verify(step, "bf16", steps=2),
    lambda: tune(step, budget_s=0.5),
):
    try:
        print(str(run()).splitlines()[0])
    except SpeedKitError as error:
        assert len(str(error).splitlines()) == 1, error
        assert "Broken.find_spec raises RuntimeError: boom" in str(error), error
        print(error)
assert torch.equal(weight, model.weight)
assert broken in sys.meta_path
"""


@pytest.mark.slow
@pytest.mark.parametrize("place", ["0", "len(sys.meta_path)"])
def test_in_a_process_where_little_is_loaded_yet(tmp_path: Path, place):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(place=place))
    exit_code, printed = fresh.run(program)
    assert exit_code == 0, printed[-3000:]

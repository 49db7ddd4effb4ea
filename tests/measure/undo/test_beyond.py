"""What can't be put back is named before the step runs; iterators give again what was drawn."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from speedkit_jupyter.measure.subject.from_function import step_of
from speedkit_jupyter.measure.subject.step import StateWarning
from speedkit_jupyter.measure.undo import custody
from speedkit_jupyter.measure.undo.kinds import base


def said(step: Any, steps: int = 2) -> tuple[list[str], list[str]]:
    """The lines before the step runs, and those after it."""
    measured = step_of(step)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", StateWarning)
        with measured.isolated():
            before = [str(one.message) for one in caught]
            for _ in range(steps):
                measured.rewind()
                step()
    return before, [str(one.message) for one in caught][len(before) :]


def test_a_step_that_can_be_undone_is_silent():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    batches, log = iter([torch.ones(1, 2)] * 3), {"loss": []}

    def step() -> None:
        loss = model(next(batches)).sum()
        loss.backward()
        optimizer.step()
        log["loss"].append(loss.item())

    assert said(step) == ([], [])
    assert log == {"loss": []}
    assert len(list(batches)) == 3


def test_files_caches_and_what_a_tuple_draws_from_are_named(tmp_path):
    with open(tmp_path / "log.txt", "w") as file:
        pair = (iter(range(9)), (i for i in range(9)))
        cached = functools.lru_cache(None)(lambda i: i)

        def step() -> None:
            file.write("x")
            cached(next(pair[0]) + next(pair[1]))

        before, after = said(step)
    assert "file is written to for real: that can't be put back" in before
    assert any("pair[0] (range_iterator), pair[1] (generator) are drawn" in one for one in before)
    assert any("cached (_lru_cache_wrapper)" in one for one in before)
    assert after == []


@pytest.mark.parametrize("writes", [False, True])
def test_what_is_too_large_is_named_before_and_again_if_it_was_written(monkeypatch, writes):
    monkeypatch.setattr(base, "MOST_BYTES", 1000)
    data = {"x": torch.zeros(1000)}

    def step() -> None:
        if writes:
            data["x"][3] += 1

    before, after = said(step)
    assert any("data['x'] (Tensor) is too large to copy" in one for one in before)
    assert after == (
        ["data['x'] was changed by the step, and could not be put back"] if writes else []
    )


def test_each_thing_is_said_once():
    generator = (i for i in range(9))
    measured = step_of(lambda: next(generator))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", StateWarning)
        for _ in range(2):
            with measured.isolated():
                pass
    assert len(caught) == 1


def test_a_warning_that_is_an_error_leaves_everything_in_place():
    generator = (i for i in range(9))
    found = generator
    measured = step_of(lambda: next(generator))
    with warnings.catch_warnings():
        warnings.simplefilter("error", StateWarning)
        with pytest.raises(StateWarning, match="generator"), measured.isolated():
            pass
    assert generator is found
    assert custody.in_progress() is None


def loader(workers: int = 0) -> Any:
    """A shuffled one."""
    generator = torch.Generator().manual_seed(0)
    return torch.utils.data.DataLoader(
        torch.arange(12.0), batch_size=2, shuffle=True, generator=generator, num_workers=workers
    )


SOURCES = {
    "generator": lambda: (torch.tensor([float(i)]) for i in range(6)),
    "list": lambda: iter([torch.tensor([float(i)]) for i in range(6)]),
    "zip": lambda: map(torch.stack, zip(torch.arange(6.0), torch.arange(6.0), strict=True)),
    "loader": lambda: iter(loader()),
}


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("where", ["variable", "attribute", "dict", "list"])
@pytest.mark.filterwarnings("ignore::speedkit_jupyter.measure.subject.step.StateWarning")
def test_an_iterator_gives_again_what_was_drawn_wherever_it_is_held(kind, where):
    class Holder:
        pass

    expected = [one.tolist() for one in SOURCES[kind]()]
    source, holder = SOURCES[kind](), Holder()
    holder.it, table, row = source, {"it": source}, [source]
    seen: list[Any] = []

    def step() -> None:
        held = {"variable": source, "attribute": holder.it, "dict": table["it"], "list": row[0]}
        seen.append(next(held[where]).tolist())

    measured = step_of(step)
    with measured.isolated():
        for _ in range(3):
            measured.rewind()
            step()
        assert seen == [expected[0]] * 3
    assert seen == []
    held = {"variable": source, "attribute": holder.it, "dict": table["it"], "list": row[0]}
    assert len({id(one) for one in held.values()}) == 1
    assert [one.tolist() for one in held[where]] == expected


def test_a_loaders_iterator_is_the_same_object_again():
    it = iter(loader())
    next(it)
    drawn, seen = it._num_yielded, id(it)
    with step_of(lambda: next(it)).isolated():
        next(it)
    assert (it._num_yielded, id(it)) == (drawn, seen)
    assert len(list(it)) == 5

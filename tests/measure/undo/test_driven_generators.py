"""A generator that a step sends to goes on for real; one that it draws from is given again."""

from __future__ import annotations

import warnings

import pytest

from speedkit_jupyter.measure.subject.from_function import step_of


def said(step) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        measured = step_of(step)
        with measured.isolated():
            step()
    return [str(one.message) for one in caught]


def counts():
    total = 0
    while True:
        try:
            total += (yield total) or 0
        except KeyError:
            total += 1


DRIVES = {
    "send": lambda one: one.send(1),
    "throw": lambda one: one.throw(KeyError()),
    "close": lambda one: one.close(),
}


@pytest.mark.parametrize("drive", DRIVES)
def test_what_was_driven_is_named_as_such(drive):
    generator = counts()
    next(generator)
    lines = said(lambda: DRIVES[drive](generator))
    assert any("generator (generator) was driven by send()" in one for one in lines)


def test_what_was_only_drawn_from_is_not():
    generator = counts()
    assert not any("driven" in one for one in said(lambda: next(generator)))

"""A panel's step that only makes a coroutine or a generator is refused in its status line."""

from __future__ import annotations

import re

import pytest
import torch

from speedkit_jupyter import Panel

model = torch.nn.Linear(2, 2)


async def waits():
    model(torch.rand(1, 2))


def goes():
    yield model(torch.rand(1, 2))


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (waits, "waits is an async function"),
        (goes, "goes is a generator function"),
        (lambda: waits(), "that nobody runs"),
        (lambda: goes(), "that nobody runs"),
    ],
)
def test_measure_says_what_to_do(step, words):
    panel = Panel(model, step=step, budget_s=0.05)
    panel.buttons["Measure"].click()
    assert words in re.sub(r"<[^>]+>", "", panel.status.value)

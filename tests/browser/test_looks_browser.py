"""At the widths that JupyterLab gives: nothing is squeezed, wraps badly or is cut off."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.browser

SETUP = """
%load_ext speedkit_jupyter
import torch
from torch import nn
torch.set_num_threads(1)
model = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 36, 10))
optimizer = torch.optim.AdamW(model.parameters())
x, y = torch.rand(8, 1, 8, 8), torch.randint(10, (8,))

def train_step():
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
PANEL = "%speedkit panel model --step train_step"
# The reasons' column, and whether each control's buttons stand in one line; None until it is drawn.
LOOKS = """() => {
  const panel = document.querySelector('.speedkit-panel');
  const tables = [...panel.querySelectorAll('table')];
  const why = tables.length && tables[tables.length - 1].querySelector('th:last-child');
  if (!why || panel.clientWidth < 100) return null;
  const every = [...panel.querySelectorAll('.widget-toggle-buttons')];
  const shown = every.filter(one => one.clientWidth);
  const wrapped = shown.filter(one => new Set([...one.querySelectorAll('button')].map(
    button => Math.round(button.getBoundingClientRect().top))).size > 1);
  const edge = panel.getBoundingClientRect().right + 1;
  const cut = [...panel.querySelectorAll('button, th, td')].filter(
    one => one.clientWidth && one.getBoundingClientRect().right > edge);
  return {panel: panel.clientWidth, why: why.clientWidth, wrapped: wrapped.length, cut: cut.length};
}"""


def settled(page, width):
    """How the panel looks once it has followed a window that was widened, and moves no more."""
    wider = f"width => {{ const found = ({LOOKS})(); return found && found.panel > width; }}"
    page.wait_for_function(wider, arg=width)
    looks = None
    while looks != (now := page.evaluate(LOOKS)):
        looks = now
        page.wait_for_timeout(500)
    return looks


def test_reasons_have_room_and_toggles_do_not_wrap(open_notebook):
    page = open_notebook(SETUP, PANEL, width=600)
    page.evaluate("() => { jupyterapp.commands.execute('application:toggle-left-area') }")
    page.locator(".speedkit-panel table").first.wait_for()
    looks = {"panel": 0}
    for width in (600, 790, 980, 1200):
        page.set_viewport_size({"width": width, "height": 900})
        looks = settled(page, looks["panel"])
        assert looks["why"] > 0.35 * min(looks["panel"], 600), (width, looks)
        assert looks["wrapped"] == 0, (width, looks)
        assert looks["cut"] == 0, (width, looks)


def test_progress_is_a_table_that_ends_as_the_result_in_its_place(open_notebook):
    bench = "%%speedbench --compare baseline,bf16,channels_last --budget 6\ntrain_step()"
    page = open_notebook(SETUP, bench, width=790)
    page.get_by_text("3 variants").wait_for()
    shown = page.locator(".speedkit table")
    shown.wait_for()
    assert shown.locator("tbody tr").count() == 3
    page.get_by_text("more note").wait_for()
    assert page.locator(".speedkit table").count() == 1
    assert page.get_by_text("Median time of one step").is_hidden()
    page.get_by_text("more note").click()
    page.get_by_text("Median time of one step").wait_for()

"""Test the panel as users see it in JupyterLab, with a real kernel and at several widths."""

import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.browser

SETUP = """
%load_ext speedkit_jupyter
import torch
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 36, 10))
optimizer = torch.optim.AdamW(model.parameters())
x, y = torch.rand(32, 1, 8, 8), torch.randint(10, (32,))

def train_step():
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

def slow_step():  # so noisy that no verdict is clear before the click, however late that comes
    import os, time
    time.sleep(0.05 + os.urandom(1)[0] / 500)
    train_step()

def state():
    import speedkit_jupyter.catalog  # which declares its flags
    from speedkit_jupyter.machines import flags
    from speedkit_jupyter.torchglue import dynamo as torch_private
    torch_private.import_compiler()  # as the kernel does between cells: it has flags, too
    tensors = [p.tolist() for p in model.parameters()]
    strides = [p.stride() for p in model.parameters()]
    return tensors, strides, str(optimizer.state_dict()), dict(flags.snapshot())

before = state()
"""
# With many parameters and few samples, a fused optimizer is faster on any machine.
WIDE = """
model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(),
                      nn.Linear(1024, 10))
optimizer = torch.optim.AdamW(model.parameters())
x, y = torch.rand(16, 256), torch.randint(10, (16,))
"""
PANEL = "from speedkit_jupyter import Panel\npanel = Panel(model, step={}, budget_s={})\npanel"
PICTURE = Path(__file__).parents[2] / "notebooks/images/panel.png"
LONG_MS = 120_000  # the machine may be busy
RESULT = re.compile(r"\d+ rounds?[;)]")  # in a headline with or without an interval
SECOND_ROUND = re.compile(r"round ([2-9]|\d\d)")


class Page:
    """A page with a panel, and a method `ask` that runs cells in its kernel."""

    def __init__(self, page: Any) -> None:
        from playwright.sync_api import expect

        expect.set_options(timeout=LONG_MS)
        self.page, self.expect, self.asked = page, expect, 0
        self.panel = page.locator(".speedkit-panel")
        expect(self.panel).to_be_visible()

    def button(self, name: str) -> Any:
        """Return a button of the panel by its accessible name, which begins with the icon."""
        return self.panel.get_by_role("button", name=re.compile(rf"\W*{name}$"))

    def option(self, label: str, word: str) -> Any:
        """Return the button `word` of the control that has this label."""
        found, has = self.panel.locator(".widget-toggle-buttons"), self.page.get_by_text
        row = found.filter(has=has(label, exact=True))
        return row.get_by_role("button", name=word, exact=True)

    def shows(self, text: str | re.Pattern[str]) -> None:
        self.expect(self.panel).to_contain_text(text)

    def ask(self, source: str, answer: str) -> None:
        """Print the value of `source` in a new last cell; assert that `answer` appears there."""
        self.asked += 1
        mark = f"answer {self.asked}:"
        self.page.evaluate(
            """async ([source]) => {
              const all = jupyterapp.commands;
              await all.execute('notebook:move-cursor-down');
              const notebook = jupyterapp.shell.currentWidget.content;
              notebook.activeCellIndex = notebook.widgets.length - 1;
              await all.execute('notebook:insert-cell-below');
              notebook.activeCell.model.sharedModel.setSource(source);
              all.execute('notebook:run-cell');
            }""",
            [f"print({mark!r}, {source})"],
        )
        found = self.page.locator(".jp-OutputArea-output", has_text=mark).last
        self.expect(found).to_contain_text(f"{mark} {answer}")


@pytest.fixture
def opened(open_notebook):
    """Return a function that opens a page with a panel; if `long`, measuring takes minutes."""

    def go(long: bool = False, width: int = 1200) -> Page:
        panel = PANEL.format("slow_step", 600) if long else PANEL.format("train_step", 4)
        return Page(open_notebook(SETUP, panel, width=width))

    return go


def test_toggle_preview_apply_measure_restore_and_reload(opened):
    page = opened()
    page.shows("Nothing is applied")
    page.option("precision", "bf16").click()
    page.shows("● bf16")
    page.panel.get_by_text("more", exact=True).click()
    page.option("channels_last", "true").click()
    page.option("tf32", "highest").click()
    page.shows("as asked; full float32, unchanged")
    page.ask("panel.config.precision, panel.config.tf32, state() == before", "bf16 highest True")
    page.button("Apply").click()
    page.shows("Applied to model: precision bf16, channels_last, fused_optimizer")
    page.ask("ctx.plan['precision'].value, torch.get_float32_matmul_precision()", "bf16 highest")
    page.ask("optimizer.param_groups[0]['fused'], model[0].weight.stride()[1]", "True 1")
    page.button("Measure").click()
    page.shows(RESULT)
    page.button("Restore").click()
    page.shows("Nothing is applied")
    page.ask("state() == before", "True")

    page.page.evaluate("() => { jupyterapp.commands.execute('docmanager:save') }")
    page.page.wait_for_function("() => !jupyterapp.shell.currentWidget.context.model.dirty")
    page.page.reload()
    page.shows(RESULT)
    page.shows("Nothing is applied")
    page.expect(page.panel.locator(".mod-active", has_text="bf16")).to_be_visible()


def test_stop_ends_a_long_measurement_and_cells_run_meanwhile(opened):
    page = opened(long=True)
    page.button("Measure").click()
    page.shows(SECOND_ROUND)
    page.ask("panel.result", "None")
    page.expect(page.button("Apply")).to_be_disabled()
    page.button("Stop").click()
    page.expect(page.button("Measure")).to_be_enabled()
    page.ask("panel.result is not None, state() == before", "True True")


def test_stop_interrupts_a_step_that_hangs(open_notebook):
    hang = "import time\ndef train_step():\n    model(x)\n    time.sleep(600)\n"
    page = Page(open_notebook(SETUP + hang, PANEL.format("train_step", 600)))
    page.button("Measure").click()
    page.expect(page.button("Stop")).to_be_enabled()
    page.button("Stop").click()
    page.expect(page.button("Measure")).to_be_enabled()


def test_a_magic_is_followed_and_the_keyboard_works(opened):
    page = opened()
    page.ask("get_ipython().run_line_magic('speedkit', 'apply model --precision fp16')", "None")
    page.shows("Applied to model: precision fp16")
    page.option("precision", "bf16").focus()
    page.page.keyboard.press("Enter")
    page.shows("Apply would make it: precision bf16")
    page.button("Restore").focus()
    page.page.keyboard.press("Space")
    page.shows("Nothing is applied")
    page.ask("state() == before", "True")


@pytest.mark.thorough
def test_the_picture_in_the_readme_is_of_this_panel(open_notebook):
    """Replace the picture, so that it shows the current panel."""
    cell = f"import os\nos.environ.pop('SPEEDKIT_HARDWARE')\n{SETUP}{WIDE}"
    page = Page(open_notebook(cell, PANEL.format("train_step", 15), width=1250, height=1200))
    page.page.evaluate("() => { jupyterapp.commands.execute('application:toggle-left-area') }")
    page.button("Apply").click()
    page.shows("Applied to model: fused_optimizer")
    page.button("Measure").click()

    page.shows(RESULT)
    page.panel.screenshot(path=PICTURE)


MAGIC = "%speedkit panel model --step train_step"
# Widths of the panel and its reasons, and counts of wrapped and cut elements; null until drawn.
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
    """Wait until the panel is wider than `width` and stays still; return the values of LOOKS."""
    wider = f"width => {{ const found = ({LOOKS})(); return found && found.panel > width; }}"
    page.wait_for_function(wider, arg=width)
    looks = None
    while looks != (now := page.evaluate(LOOKS)):
        looks = now
        page.wait_for_timeout(500)
    return looks


def test_reasons_have_room_and_toggles_do_not_wrap(open_notebook):
    page = open_notebook(SETUP, MAGIC, width=600)
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

"""Test the panel without a browser: set what the front end would send, and read the widgets."""

import asyncio
import gc
import math
import re
import threading
from collections.abc import Iterator
from html import unescape
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from made_time import MadeTime
from torch import nn
from training import everything

from speedkit_jupyter import Panel, SpeedConfig, apply_speedups, restore_all
from speedkit_jupyter.notebook import session
from speedkit_jupyter.notebook.panel import panel as panels
from speedkit_jupyter.notebook.progress import never_falling
from speedkit_jupyter.rounds.comparison import Progress
from speedkit_jupyter.rounds.statistics import INTERVAL

pytestmark = pytest.mark.usefixtures("trusted")


@pytest.fixture
def names() -> Iterator[Any]:
    """Yield a notebook's variables as attributes: model, optimizer, x, y and train_step."""
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    space = SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters()))
    space.x, space.y = torch.rand(8, 1, 8, 8), torch.randint(10, (8,))

    def train_step() -> float:
        loss = nn.functional.cross_entropy(space.model(space.x), space.y)
        loss.backward()
        space.optimizer.step()
        space.optimizer.zero_grad()
        return float(loss.item())

    space.train_step = train_step
    del model
    session.begin(vars(space))
    yield space
    session.end()


@pytest.fixture
def every_round_drawn(names: Any, monkeypatch: pytest.MonkeyPatch, made_time: MadeTime) -> None:
    """Make steps noisy, so that a measurement uses its whole budget, and draw every round."""
    monkeypatch.setattr(panels, "INTERVAL_S", 0.0)
    step = names.train_step

    def noisy() -> float:
        made_time.sleep(made_time.perf_counter() * 7919 % 0.02)
        return float(step())

    names.train_step = noisy


def pick(panel: Panel, path: str, word: str) -> None:
    control = panel.controls[path].input
    index = [value for _, value in control.options].index(word)
    control.set_state({"index": index})


def labels(panel: Panel, path: str) -> list[str]:
    return [label for label, _ in panel.controls[path].input.options]


def text(html: str) -> str:
    html = re.sub(r"</?a\b[^>]*>", "", html)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", " ", html)))


def test_auto_shows_what_it_stands_for_and_what_cannot_be_had_its_reason(names, machine):
    machine("cpu_avx512_bf16")
    panel = Panel(names.model)
    assert labels(panel, "precision")[0] == "auto → fp32"
    assert "Worth measuring here: precision bf16" in text(panel.state.value)
    assert labels(panel, "sdpa.backend")[0] == "auto"
    pick(panel, "sdpa.backend", "flash")
    assert "CUDA kernel" in text(panel.state.value)
    assert panel.controls["threads"].input.placeholder.startswith("auto → ")


def test_a_change_of_a_control_shows_what_would_change_and_applies_nothing(names, machine):
    machine("cpu")
    before = everything(names.model, names.optimizer)
    panel = Panel(names.model)
    pick(panel, "precision", "bf16")
    assert panel.config.precision == "bf16"
    shown = text(panel.state.value)
    assert "Apply would turn on: precision bf16" in shown
    assert "Nothing is applied" in shown
    assert "speedkit-changed" in panel.state.value
    assert panel.context is None
    assert everything(names.model, names.optimizer) == before
    pick(panel, "precision", "auto")
    assert "precision bf16" not in text(panel.state.value)


@pytest.mark.smoke
def test_apply_does_what_was_shown_and_restore_undoes_it_exactly(names):
    before = everything(names.model, names.optimizer)
    panel = Panel(names.model)
    pick(panel, "precision", "bf16")
    panel.controls["threads"].input.set_state({"value": "2"})
    panel.buttons["Apply"].click()
    assert torch.get_num_threads() == 2
    assert names.ctx is panel.context
    assert names.ctx.plan["precision"].value == "bf16"
    assert names.optimizer.param_groups[0]["fused"] is True
    assert "Applied to `model`" in panel.report().headline
    assert panel.buttons["Apply"].disabled
    panel.buttons["Restore"].click()
    assert everything(names.model, names.optimizer) == before
    assert panel.context is None
    assert panel.buttons["Restore"].disabled
    assert panel.config.precision == "bf16"  # Restore keeps the choices


def test_a_click_in_another_thread_waits_for_the_main_thread(names, monkeypatch):
    panel, waiting = Panel(names.model), []
    loop = SimpleNamespace(add_callback=waiting.append)
    shell = SimpleNamespace(kernel=SimpleNamespace(io_loop=loop))
    monkeypatch.setattr(panels.background_run, "get_ipython", lambda: shell)
    panel.buttons["Apply"].click()
    assert panel.context is not None
    clicks = threading.Thread(target=panel.buttons["Restore"].click)
    clicks.start()
    clicks.join()
    assert panel.context is not None
    assert "Waits until the cell has ended" in panel.status.value
    waiting.pop()()
    assert panel.context is None


@pytest.mark.smoke
def test_bad_input_is_one_line_beside_its_control(names):
    panel = Panel(names.model)
    panel.controls["threads"].input.set_state({"value": "many"})
    assert "'many' is not allowed" in text(panel.controls["threads"].note.value)
    assert panel.config.threads == "auto"
    panel.controls["threads"].input.set_state({"value": "3"})
    assert panel.config.threads == 3
    assert "many" not in panel.controls["threads"].note.value
    panel.controls["threads"].input.set_state({"value": ""})
    assert panel.config.threads == "auto"


def test_panels_of_one_model_agree_and_follow_what_is_applied_elsewhere(names):
    names.other = nn.Sequential(nn.Linear(2, 2))
    one, two, other = Panel(names.model), Panel(names.model), Panel(names.other)
    pick(two, "precision", "bf16")
    assert other.controls["precision"].input.value == "auto"
    two.buttons["Apply"].click()
    assert one.controls["precision"].input.value == "bf16"
    assert "Applied" in one.state.value
    assert "Applied" not in other.state.value
    one.buttons["Restore"].click()
    assert "Nothing is applied" in two.state.value
    context = apply_speedups(names.model, SpeedConfig(precision="fp16"))[1]
    assert one.controls["precision"].input.value == "fp16"
    context.restore()
    apply_speedups(names.model, SpeedConfig(precision="fp16"))
    restore_all()
    assert one.buttons["Restore"].disabled


def test_a_deleted_model_is_not_kept_alive_and_gives_a_plain_message(names):
    panel = Panel(names.model, step="train_step", budget_s=0.05)
    panel.buttons["Measure"].click()
    assert panel.result is not None, panel.status.value
    names.optimizer = None
    del names.model
    gc.collect()
    assert "no longer exists" in panel.state.value
    assert all(button.disabled for button in panel.buttons.values())
    assert "no longer exists" in repr(panel)
    assert "no longer exists" in panel._repr_mimebundle_()["text/html"]


def test_the_switch_auto_is_the_magic_and_shows_its_line(names):
    from IPython.testing.globalipapp import get_ipython

    shell = get_ipython()
    shell.run_line_magic("load_ext", "speedkit_jupyter")
    session.begin(shell.user_ns)
    panel = Panel(names.model)
    assert not panel.auto.value
    panel.auto.set_state({"value": True})
    assert "auto is on" in panel.live.value
    shell.run_line_magic("speedkit", "auto off")
    assert not panel.auto.value
    assert panel.live.value == ""
    shell.run_line_magic("speedkit", "auto on")
    assert panel.auto.value
    panel.auto.set_state({"value": False})
    assert panel.live.value == ""
    shell.run_line_magic("unload_ext", "speedkit_jupyter")


@pytest.mark.smoke
def test_the_bundle_has_the_view_and_the_same_content_as_html_and_text(names):
    panel = Panel(names.model)
    pick(panel, "precision", "bf16")
    pick(panel, "channels_last", "true")
    bundle = panel._repr_mimebundle_()
    assert bundle["application/vnd.jupyter.widget-view+json"]["model_id"] == panel.widget.model_id
    for kind in ("text/html", "text/plain"):
        shown = text(bundle[kind])
        for word in ("Nothing is applied", "● bf16", "cudnn", "channels_last"):
            assert word in shown, (kind, word)


@pytest.mark.parametrize(
    ("step", "told"), [(None, "run a %%speedbench cell"), ("nothing", "no longer exists"),
    (lambda: 1 / 0, "ZeroDivisionError: division by zero")],
)  # fmt: skip
def test_without_a_step_measure_says_what_to_do(names, step, told):
    panel = Panel(names.model, step=step)
    panel.buttons["Measure"].click()
    assert told in text(panel.status.value)
    with pytest.raises(TypeError, match=r"torch.nn.Module, not str"):
        Panel("model")


def drain(panel: Panel, button: str, cell: Any = None) -> int:
    """Click a button, call `cell(turn)` in each turn of the event loop, and return their number."""
    turns = 0

    async def main() -> None:
        nonlocal turns
        panel.buttons[button].click()
        while not panel.buttons["Stop"].disabled:
            await asyncio.sleep(0)
            if cell is not None:
                cell(turns)
            turns += 1

    asyncio.run(main())
    return turns


@pytest.mark.checked
@pytest.mark.smoke
@pytest.mark.usefixtures("every_round_drawn")
def test_measure_compares_baseline_with_the_choice_and_draws_it(names):
    before = everything(names.model, names.optimizer)

    panel = Panel(names.model, step=names.train_step, budget_s=10)
    pick(panel, "precision", "bf16")
    seen = []
    assert drain(panel, "Measure", lambda turn: seen.append(panel.status.value)) > 3
    assert [one.name for one in panel.result.records] == ["baseline", "this choice"]
    assert panel.result.records[1].applied["precision"] == "bf16"
    assert INTERVAL in panel.outcome.value
    assert any("round" in one for one in seen)
    assert INTERVAL in repr(panel)
    assert everything(names.model, names.optimizer) == before
    assert not panel.buttons["Measure"].disabled


@pytest.mark.smoke
@pytest.mark.usefixtures("every_round_drawn")
def test_stop_ends_a_long_measurement_with_the_results_so_far(names):
    before = everything(names.model, names.optimizer)
    panel = Panel(names.model, step=names.train_step, budget_s=600)

    def cell(turn: int) -> None:
        if re.search(r"round ([2-9]|\d\d)", panel.status.value):  # a round is over
            panel.buttons["Stop"].click()

    drain(panel, "Measure", cell)
    assert panel.result.baseline.times_s
    assert "Stopped" in panel.status.value
    assert everything(names.model, names.optimizer) == before


def test_progress_never_falls():
    states = never_falling([Progress(0.5, "round 9"), Progress(0.1, "confirming")])
    assert [(one.done, one.text) for one in states] == [(0.5, "round 9"), (0.5, "confirming")]


@pytest.mark.parametrize("ends_s", [4.0, pytest.param(math.inf, marks=pytest.mark.slow)])
def test_tune_chooses_a_proven_or_a_likely_plan_without_applying(
    names, made_time, few_candidates, ends_s
):
    ends_s += made_time.now_s()

    def step() -> None:
        made_time.sleep(0.003 if names.optimizer.param_groups[0]["fused"] else 0.05)
        if made_time.now_s() > ends_s:
            raise KeyboardInterrupt
        names.train_step()

    panel = Panel(names.model, step=step, tune_budget_s=30)
    drain(panel, "Tune")
    assert "fused_optimizer" in panel.outcome.value
    is_likely = ends_s < math.inf
    assert ("Likely: " in text(panel.outcome.value)) is is_likely
    for shown in (panel.status, panel.state):
        assert ("likely, not proven" in text(shown.value)) is is_likely
    assert panel.config.fused_optimizer.enabled is True
    assert panel.context is None
    assert panel.controls["fused_optimizer.enabled"].input.value == "true"
    assert labels(panel, "precision")[0] == "auto → as is"
    panel.buttons["Apply"].click()
    assert names.optimizer.param_groups[0]["fused"] is True
    assert panel.context.plan["fused_optimizer"].source == "measured"
    panel.buttons["Restore"].click()

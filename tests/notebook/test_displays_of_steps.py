"""What a measured step displays: dropped but for the first call; its widgets are gone after it."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("made_time")]

SETUP = """
%load_ext speedkit_jupyter
%matplotlib inline
import ipywidgets, torch, matplotlib.pyplot as plt
import ipywidgets.widgets.widget as registry
from IPython.display import HTML, clear_output, display
from tqdm.auto import tqdm
from torch.utils.data import DataLoader
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
x = torch.randn(8, 4)
loader = DataLoader(torch.randn(64, 4), batch_size=16)
mine = ipywidgets.IntText(3)

class Shown:
    def __repr__(self):
        return "Shown by the step"

def work():
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()

def state():
    print(len(registry._instances), mine.comm is not None, plt.get_fignums())
"""
STEPS = {
    "display": "display(Shown()); work()",
    "figures": "plt.plot([1, 2]); plt.show(); display(Shown()); work()",
    "bars": "for _ in tqdm(range(3)): work()",
    "widgets": "s = ipywidgets.IntSlider(); display(s); s.value = 5; work()",
}
COMMANDS = {
    "comparing": "%%speedbench --compare baseline,baseline --budget 1",
    "timing": "%%speedbench --budget 1",
}


@pytest.fixture
def before(kernel) -> str:
    """The widgets and figures that there are before a step is measured."""
    assert kernel(SETUP)["status"] == "ok"
    return kernel("state()")["text"]


@pytest.mark.slow
def test_only_the_first_call_is_shown_and_no_widget_or_figure_is_left(kernel, before):
    for name, command in COMMANDS.items():
        for kind, step in STEPS.items():
            reply = kernel(f"{command}\n{step}")
            assert reply["status"] == "ok", reply["traceback"]
            assert reply["text"].count("Shown by the step") <= 1, (name, kind)
            assert not {"IntSlider", "FloatProgress"} & set(reply["text"].split("(")), (name, kind)
            assert kernel("state()")["text"] == before, (name, kind)

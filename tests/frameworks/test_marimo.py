"""A marimo app calls the Python functions, without IPython's shell."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("marimo")
pytestmark = pytest.mark.slow

APP = """
import marimo

app = marimo.App()


@app.cell
def _():
    import marimo as mo
    import torch
    import speedkit_jupyter as sk

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.rand(8, 16)

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return mo, model, optimizer, sk, step


@app.cell
def _(model, optimizer, sk):
    config = sk.SpeedConfig(fused_optimizer=True, compile=False)
    with sk.apply_speedups(model, config, optimizer=optimizer)[1] as context:
        applied = optimizer.param_groups[0]["fused"], str(context)
    restored = optimizer.param_groups[0]["fused"]
    return applied, restored


@app.cell
def _(mo, sk, step):
    compared = sk.benchmark(step, "baseline,fused_optimizer", budget_s=1)
    html = mo.as_html(compared).text
    tuned = sk.tune(step, budget_s=2)
    return compared, html, tuned


@app.cell
def _(sk, step):
    with sk.auto() as races:
        for _ in range(30):
            step()
        loops = len(races.loops)
    sk.restore_all()
    return (loops,)


if __name__ == "__main__":
    _, found = app.run()
    assert found["applied"][0] is True, found["applied"]
    assert not found["restored"]
    assert {one.name for one in found["compared"].records} == {"baseline", "fused_optimizer"}
    assert "text/html" in found["html"]
    assert "speedkit" in found["html"]
    assert found["tuned"].tried.plans
    assert found["loops"] == 1
    from IPython import get_ipython
    assert get_ipython() is None
    print("all of it works")
"""


def test_apply_benchmark_tune_auto_and_restore_work_in_a_marimo_app(tmp_path):
    (tmp_path / "app.py").write_text(APP)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "app.py")],
        env={**os.environ, "SPEEDKIT_DATA": str(tmp_path / "data")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.endswith("all of it works\n"), done.stderr

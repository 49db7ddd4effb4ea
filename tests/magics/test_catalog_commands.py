"""%speedkit catalog and %speedkit explain."""

from __future__ import annotations

import pytest

from speedkit_jupyter.optimizations import CATALOG


def test_catalog_lists_every_optimization_also_before_there_is_a_model(plain_shell):
    plain_shell.ip.run_line_magic("load_ext", "speedkit_jupyter")
    shown = plain_shell.run("%speedkit catalog")
    assert "for a float32 model" in shown
    for optimization in CATALOG:
        assert optimization.name in shown
    plain_shell.ip.run_line_magic("unload_ext", "speedkit_jupyter")


@pytest.mark.parametrize("optimization", CATALOG, ids=lambda entry: entry.name)
def test_explain_says_what_helps_what_is_at_risk_and_how_it_goes_back(shell, optimization):
    shown = " ".join(shell.run(f"%speedkit explain {optimization.name}").split())
    for sentence in (optimization.helps, optimization.risk, optimization.undone):
        assert sentence in shown
    assert optimization.page in shown


def test_explain_takes_other_spellings_and_names_the_nearest_of_what_it_does_not_know(shell):
    assert "tf32" in shell.run("%speedkit explain tf32_matmul_precision")
    error = str(shell.fails("%speedkit explain gem"))
    assert "no 'gem' in the catalog" in error
    assert "gemm" in error


def test_explain_measures_attention_on_the_calls_of_a_step(shell):
    shell.run(
        "class Attending(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.inner = nn.Linear(8, 8)\n"
        "    def forward(self, x):\n        q = self.inner(x)\n"
        "        return nn.functional.scaled_dot_product_attention(q, q, q)\n"
        "attending = Attending()\nbatch = torch.rand(2, 2, 16, 8)\n"
        "def step():\n    attending(batch).sum().backward()\n"
        "    attending.zero_grad()\n"
        "def plain():\n    model(x)"
    )
    shown = " ".join(shell.run("%speedkit explain sdpa attending --step step").split())
    assert "Attention kernels on the calls of the step" in shown
    assert "2×2×16×8" in shown
    assert "flash (torch's own choice)" in shown
    assert shell.names["attending"].inner.weight.grad is None
    assert "measured on 1 kind of calls" in " ".join(
        shell.run("%speedkit report attending").split()
    )
    shown = shell.run("%speedkit explain sdpa model --step plain")
    assert "plain makes no call of scaled_dot_product_attention" in " ".join(shown.split())
    for line, told in (
        ("gemm --step step", "--step is for sdpa"),
        ("sdpa --step nosuch", "no function 'nosuch'"),
        ("sdpa --step x", "no function but of class Tensor"),
    ):
        assert told in str(shell.fails(f"%speedkit explain {line}"))

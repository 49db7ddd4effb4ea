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

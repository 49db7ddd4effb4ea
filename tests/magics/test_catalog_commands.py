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


def test_catalog_of_a_model_says_what_is_applied_to_it(shell):
    shell.run("%speedkit apply model --sdpa math")
    shown = shell.run("%speedkit catalog model")
    assert "The catalog for `model`" in shown
    assert "● on" in shown


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


def test_explain_says_what_each_field_takes(shell):
    shown = " ".join(shell.run("%speedkit explain compile").split())
    assert "auto, true, false; scope: auto, model, blocks; mode: default" in shown
    assert "backend: inductor, eager" in shown

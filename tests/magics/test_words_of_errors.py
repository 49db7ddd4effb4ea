"""What is wrong in a line or a cell is said in one line, with the next step."""

from __future__ import annotations

import pytest
from IPython.core.error import UsageError


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("%speedkit apply --foo", "unknown option '--foo'. %speedkit help apply lists them"),
        ("%speedkit apply --precison=bf16", "Did you mean '--precision'?"),
        ("%speedkit apply --as torch", "%speedkit help apply lists them"),
        ("%speedkit apply --fused-optimzer", "Did you mean '--fused-optimizer'?"),
        ("%speedkit apply --optimizer", "%speedkit apply: --optimizer needs a value"),
        ("%speedkit verify --steps x", "%speedkit verify: --steps: no whole number: 'x'"),
        ("%speedkit config -h", "%speedkit config: %speedkit help config says what it takes"),
        ("%%speedbench --compare baseline,bf16++compile\nmodel(x)", "a word is missing at its +"),
        ("%%speedbench --compare baseline,thread:1\nmodel(x)", "Did you mean 'threads:1'?"),
        ("%%speedbench --compare baseline,bf16\nmodle(x)", "'modle' is not defined. Did you mean"),
        ("%%speedbench --tune\nnet(x, y)", "the name 'net' is not defined"),
        ("%%speedbench --tune\nf = lambda a: a\nf(1)", "the cell uses no model"),
    ],
)
def test_it_names_what_is_wrong_and_what_to_do(shell, source, words):
    error = shell.fails(source)
    assert isinstance(error, UsageError)
    assert words in str(error)
    assert len(str(error).splitlines()) == 1

"""torch's reasons in plain words, each with a remedy."""

from __future__ import annotations

import pytest

from speedkit_jupyter.plans.compile_reasons import BREAKS, EXPECTED, RECOMPILES, cause, explained


@pytest.mark.parametrize(
    ("reason", "what", "remedy"),
    [
        ("0/0: tensor 'x' size mismatch at index 0. expected 2, actual 3",
         "`x` had size 2 in dimension 0, then 3", "drop_last=True"),
        ("0/0: tensor 'args[0]' size mismatch at index 1. expected 2, actual 3",
         "input 1 had size 2 in dimension 1", "pad the last one"),
        ("1/0: tensor 'L['x']' dtype mismatch. expected Float, actual BFloat16",
         "`x` was Float, then BFloat16", "cast it"),
        ("0/0: lr == 2.0      # def step(x, lr): return x*lr  # a.py:32 in step",
         "the Python value `lr` changed", "pass it as a tensor"),
        ("2/4: GLOBAL_STATE changed: autocast(cpu)_enabled ", "autocast was switched", "inside"),
        ("0/1: GLOBAL_STATE changed: num_threads ", "the number of threads changed", "before"),
        ("2/0: ___stack0 == 1.5", "the Python value that this line computes changed", "tensor"),
        ("0/3: module._modules['attn'].layer_idx == 1",
         "`module._modules['attn'].layer_idx` has another value", "--compile-scope model"),
        ("0/1: 2 <= args[0].size()[0] <= 4096",
         "input 1 has a size in dimension 0 that was not compiled for", "pad the last one"),
        ("0/0: len(xs) == 2", "the length of `xs` changed", "same length"),
    ],
)  # fmt: skip
def test_recompilations_say_what_changed_and_what_to_do(reason, what, remedy):
    told = explained(reason, RECOMPILES)
    assert what in told.what
    assert remedy in told.remedy


@pytest.mark.parametrize(
    ("reason", "what", "remedy"),
    [
        ("Unsupported Tensor.item() call with capture_scalar_outputs=False", ".item()", "behind"),
        ("Data-dependent branching\n  Explanation: …", "an `if` or `while`", "torch.where"),
        ("generic_jump TensorVariable()", "an `if` or `while`", "torch.where"),
        ("Failed to trace builtin operator\n  Explanation: builtin operator `print` with",
         "`print()`", "after the call"),
        ("Skip calling `torch.compiler.disable()`d function", "torch.compiler.disable", "mark"),
    ],
)  # fmt: skip
def test_graph_breaks_say_what_broke_and_what_to_do(reason, what, remedy):
    told = explained(reason, BREAKS)
    assert what in told.what
    assert remedy in told.remedy


def test_an_unknown_reason_is_torchs_own_line_and_hint():
    told = explained("Something new\n  Explanation: it is.\n  Hint: Do that.\n", BREAKS)
    assert told == ("Something new", "Do that.")
    assert explained("", BREAKS) == ("", "")


def test_training_and_inference_are_one_graph_each():
    assert EXPECTED.search("0/0: GLOBAL_STATE changed: grad_mode ")
    assert EXPECTED.search("0/1: self.training == True")
    assert not EXPECTED.search("0/0: tensor 'x' size mismatch at index 0. expected 2, actual 3")


@pytest.mark.parametrize("first", [
    "0/1: tensor 'x' requires_grad mismatch. expected requires_grad=1",
    "0/1: tensor 'x' dtype mismatch. expected Float, actual BFloat16",
    "0/1: GLOBAL_STATE changed: grad_mode ",
])  # fmt: skip
def test_the_cause_is_that_of_the_graph_which_nearly_served_the_call(first):
    size = "0/0: tensor 'x' size mismatch at index 0. expected 8, actual 7"
    assert cause([first, size]) == cause([size, first]) == size
    assert cause([first]) == first

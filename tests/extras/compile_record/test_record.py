"""Test the record of compilations, which explains torch's reasons and gives remedies."""

import pytest
import torch

from speedkit_jupyter.extras.compile_record import history
from speedkit_jupyter.support.source_lines import Spot


@pytest.fixture
def record():
    torch._dynamo.reset()
    record = history.CompileRecord()
    record.collect()
    record.frames = record.graphs = 0
    record.total_s = 0.0
    record.news()
    record.findings.clear()
    record.listen()
    yield record
    record.end()
    torch._dynamo.reset()


def add(x, number):
    return x + number


@pytest.mark.compile
def test_another_size_is_the_cause_where_other_graphs_differ_otherwise(record):
    compiled = torch.compile(add, backend="eager", dynamic=False)
    for size, asks in ((8, False), (8, True), (7, False)):
        compiled(torch.ones(size, requires_grad=asks), 1)
    *_, last = record.news()
    assert last.what == "`x` had size 8 in dimension 0, then 7"


@pytest.mark.compile
def test_what_torch_forgets_is_kept_and_what_follows_is_seen(record):
    for _ in range(2):
        torch.compile(add, backend="eager")(torch.ones(2), 1)
        record.collect()
        torch._dynamo.reset()
        record.listen()
    assert (record.frames, record.graphs) == (2, 2)


def test_findings_about_one_line_with_one_remedy_are_one_row():
    here = Spot("a.py", 1)
    sizes = [history.Finding("recompile", here, f"size {size}", "pad") for size in range(3)]
    other = history.Finding("recompile", Spot("a.py", 2), "size 1", "pad")
    assert [*history.grouped([*sizes, other])] == [(sizes[0], 3), (other, 1)]


SIZE = "0/0: tensor 'x' size mismatch at index 0. expected 8, actual 7"


@pytest.mark.parametrize(
    ("reason", "what", "remedy"),
    [
        (SIZE.replace("'x'", "kwargs['past_key_values'].layers[0].keys"),
         "the cache of keys and values had size 8 in dimension 0, then 7", "max_cache_len"),
        (SIZE, "`x` had size 8 in dimension 0, then 7", "drop_last=True"),
        ("0/0: tensor 'args[0]' size mismatch at index 1. expected 2, actual 3",
         "input 1 had size 2 in dimension 1", "pad the last one"),
        ("0/0: lr == 2.0      # def step(x, lr): return x*lr  # a.py:32 in step",
         "the Python value `lr` changed", "pass it as a tensor"),
        ("0/3: module._modules['attn'].layer_idx == 1",
         "`module._modules['attn'].layer_idx` has another value", "--compile-scope model"),
        ("0/1: 2 <= args[0].size()[0] <= 4096",
         "input 1 has a size in dimension 0 that was not compiled for", "pad the last one"),
        ("Unsupported Tensor.item() call with capture_scalar_outputs=False", ".item()", "behind"),
        ("Data-dependent branching\n  Explanation: …", "an `if` or `while`", "torch.where"),
        ("Something new\n  Explanation: it is.\n  Hint: Do that.\n", "Something new", "Do that."),
        ("", "", ""),
    ],
)  # fmt: skip
def test_a_reason_says_what_changed_and_what_to_do(reason, what, remedy):
    told = history.explained(reason)
    assert what in told[0]
    assert remedy in told[1]


def test_training_and_inference_are_one_graph_each():
    assert history.EXPECTED.search("0/0: GLOBAL_STATE changed: grad_mode ")
    assert history.EXPECTED.search("0/1: self.training == True")
    assert not history.EXPECTED.search(SIZE)


@pytest.mark.parametrize("first", [
    "0/1: tensor 'x' requires_grad mismatch. expected requires_grad=1",
    "0/1: tensor 'x' dtype mismatch. expected Float, actual BFloat16",
    "0/1: GLOBAL_STATE changed: grad_mode ",
])  # fmt: skip
def test_the_cause_is_the_reason_of_the_graph_that_nearly_served_the_call(first):
    assert history.cause([first, SIZE]) == history.cause([SIZE, first]) == SIZE
    assert history.cause([first]) == first

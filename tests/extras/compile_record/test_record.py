"""What was compiled, from torch's own records."""

from __future__ import annotations

import pytest
import torch

from speedkit_jupyter.extras.compile_record.history import CompileRecord, Finding, grouped
from speedkit_jupyter.support.source_lines import Spot

pytestmark = pytest.mark.compile


@pytest.fixture
def record():
    """A record that listens, and knows of nothing yet."""
    torch._dynamo.reset()
    record = CompileRecord()
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


def test_news_are_told_once_and_the_record_keeps_them(record):
    compiled = torch.compile(add, backend="eager", dynamic=False)
    compiled(torch.ones(2), 1)
    assert record.news() == []
    compiled(torch.ones(3), 1)
    (one,) = record.news()
    assert (one.kind, one.what) == ("recompile", "`x` had size 2 in dimension 0, then 3")
    assert record.news() == []
    assert record.findings == [one]


def test_another_size_is_the_cause_where_other_graphs_differ_otherwise(record):
    compiled = torch.compile(add, backend="eager", dynamic=False)
    for size, asks in ((8, False), (8, True), (7, False)):
        compiled(torch.ones(size, requires_grad=asks), 1)
    *_, last = record.news()
    assert last.what == "`x` had size 8 in dimension 0, then 7"


def test_what_torch_forgets_is_kept_and_what_follows_is_seen(record):
    for _ in range(2):
        torch.compile(add, backend="eager")(torch.ones(2), 1)
        record.collect()
        torch._dynamo.reset()
        record.listen()
    assert (record.frames, record.graphs) == (2, 2)


def test_findings_about_one_line_with_one_remedy_are_one_row():
    here = Spot("a.py", 1)
    sizes = [Finding("recompile", here, f"size {size}", "pad") for size in range(3)]
    other = Finding("recompile", Spot("a.py", 2), "size 1", "pad")
    assert [*grouped([*sizes, other])] == [(sizes[0], 3), (other, 1)]

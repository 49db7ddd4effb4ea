"""Each rule speaks of its own reason, and is silent where it is wrong."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from speedkit_jupyter.advice.rules import RULES
from speedkit_jupyter.advice.rules.data.padding import padding
from speedkit_jupyter.profiling.processor import Processor

COMPUTING = {"forward": 0.4, "backward": 0.4}


def trained(net: nn.Module, x: Any, **more: Any) -> Callable[[], object]:
    """A plain training step."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        net(x).sum().backward(**more)
        optimizer.step()

    return step


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


class Squares(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(torch.ones(8, 4))


def epoch(loader: DataLoader[Any]) -> Callable[[], object]:
    """A loop over a loader."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        for batch in loader:
            x = batch[0] if isinstance(batch, list | tuple) else batch
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

    return step


def test_every_rule_has_a_name_of_its_own_and_a_test():
    names = [rule.name for rule in RULES]
    assert len(names) == len(set(names)) >= 20
    source = Path(__file__).read_text(encoding="utf-8")
    assert [name for name in names if f'"{name}"' not in source] == []


@pytest.mark.parametrize("rule", [rule.name for rule in RULES])
def test_no_rule_has_anything_against_a_healthy_step(situations, rule):
    step = trained(net(), torch.ones(64, 4))
    assert situations.found(rule, step, shares={**COMPUTING, "optimizer": 0.1}) == []


# Data.


def test_a_loader_that_takes_a_third_of_the_step_wants_workers(situations):
    step = epoch(DataLoader(Squares(), batch_size=2))
    (one,) = situations.found("workers", step, shares={"data": 0.4, "forward": 0.5})
    assert "40 %" in one.evidence
    assert one.gain.low <= 1 / (1 - 0.4) <= one.gain.high * 1.01
    assert one.part == "data"


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Stream(), batch_size=2),
        DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2),
        DataLoader(Squares(), batch_size=2, num_workers=0, sampler=range(4)),
    ],
    ids=["an iterable would come once from each", "in memory", "hardly any time"],
)
def test_workers_are_not_for(situations, loader):
    data = 0.02 if isinstance(loader.dataset, Squares) else 0.4
    assert situations.found("workers", epoch(loader), shares={"data": data}) == []


def test_one_core_has_no_place_for_workers(situations):
    step = epoch(DataLoader(Squares(), batch_size=2))
    found = situations.found("workers", step, shares={"data": 0.4}, hardware="one_core")
    assert found == []


def test_a_table_in_memory_is_drawn_by_whole_batches(situations):
    table = TensorDataset(torch.ones(8, 4))
    step = epoch(DataLoader(table, batch_size=2))
    (one,) = situations.found("in_memory", step, shares={"data": 0.5})
    assert 1.5 < one.gain.low < one.gain.high <= 2.0
    own = DataLoader(table, batch_size=2, collate_fn=lambda rows: torch.stack([r[0] for r in rows]))
    assert situations.found("in_memory", epoch(own), shares={"data": 0.5}) == []


def test_workers_that_start_for_each_loop_are_kept(situations):
    step = epoch(DataLoader(Squares(), batch_size=2))
    seen = situations.seen(step, shares={"data": 0.5})
    (loader,) = seen.loaders
    draws = seen.watched.draws[id(loader)]
    draws.begun_s, draws.next_s, draws.ended_s = [0.1], [0.1, 0.01, 0.01, 0.01], [0.02]
    (rule,) = (rule for rule in RULES if rule.name == "worker_start")
    assert list(rule.find(seen)) == []  # it has no workers
    loader.num_workers = 2
    (one,) = rule.find(seen)
    assert one.gain.high > 1.1


def test_memory_is_pinned_for_copies_to_a_gpu_only(situations):
    step = epoch(DataLoader(Squares(), batch_size=2))
    shares = {"host to device": 0.2}
    assert situations.found("pin_memory", step, shares=shares) == []
    (one,) = situations.found("pin_memory", step, shares=shares, device="cuda")
    assert "pin_memory=True" in one.remedy


class Moving(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(4).to("cpu")


def test_a_data_set_that_copies_samples_to_the_device_is_told_so_on_a_gpu(situations):
    step = epoch(DataLoader(Moving(), batch_size=2))
    assert situations.found("moved_in_data_set", step, shares={"data": 0.3}) == []
    (one,) = situations.found("moved_in_data_set", step, shares={"data": 0.3}, device="cuda")
    assert "`torch.ones(4).to('cpu')`" in one.evidence


def words(length: int, width: int = 32) -> torch.Tensor:
    batch = torch.zeros(4, width, dtype=torch.long)
    batch[:, :length] = 7
    return batch


def test_padding_is_what_the_rows_end_in():
    assert padding(words(8)) == (0.75, 0.75)
    longer = words(8)
    longer[0, :24] = 7
    found = padding(longer)
    assert found is not None
    assert found.all == pytest.approx(1 - (24 + 3 * 8) / 128)
    assert found.behind == pytest.approx(0.25)


@pytest.mark.parametrize(
    "batch",
    [
        *(torch.ones(4, 32), torch.arange(128).view(4, 32), torch.zeros(4), words(8, 4)),
        torch.ones(4, 32, dtype=torch.long),  # a mask where nothing is padded
        torch.zeros(4, 32, dtype=torch.long),  # the numbers of segments
        (words(8) > 0).long(),
        words(8) > 0,
        torch.full((4, 32), -100),
    ],
)
def test_what_is_not_padded(batch):
    found = padding(batch)
    assert found is None or found.all < 0.25


def test_batches_that_are_padding_for_the_most_part_are_cut(situations):
    reader = nn.Sequential(nn.Embedding(8, 4, padding_idx=0), nn.Linear(4, 2))
    (one,) = situations.found("padding", trained(reader, words(8)), shares=COMPUTING)
    assert one.gain.low > 1.3
    assert situations.found("padding", trained(reader, words(30)), shares=COMPUTING) == []


def test_a_batch_of_two_is_tried_with_more(situations, monkeypatch):
    step = trained(net(), torch.ones(2, 4))
    monkeypatch.setattr("speedkit_jupyter.advice.situation.Situation.ratio", lambda *a, **k: 1.0)
    (one,) = situations.found("small_batch", step, shares=COMPUTING)
    assert "larger batch than 2" in one.title
    assert "another training" in one.risk
    monkeypatch.setattr("speedkit_jupyter.advice.situation.Situation.ratio", lambda *a, **k: 3.9)
    assert situations.found("small_batch", step, shares=COMPUTING) == []


def test_a_mask_of_ones_beside_the_words_is_no_padding(situations):
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(8, 4)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return self.words(input_ids) * attention_mask[..., None]

    model, full = Masked(), torch.randint(1, 8, (4, 32))
    step = lambda ids: lambda: model(ids, attention_mask=torch.ones_like(ids)).sum().backward()  # noqa: E731
    assert situations.found("padding", step(full), shares=COMPUTING) == []
    (one,) = situations.found("padding", step(words(8)), shares=COMPUTING)
    assert one.evidence.startswith("75 %")


class OwnNumbers(Squares):
    """Each worker would draw the same numbers from its copy of the generator."""

    def __init__(self) -> None:
        self.numbers = np.random.default_rng(0)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), self.numbers.random())


class OpenFile(Squares):
    """Workers would share the place at which a file is read."""

    def __init__(self) -> None:
        self.file = open(__file__, encoding="utf-8")  # noqa: SIM115


@pytest.mark.parametrize("kind", [OwnNumbers, OpenFile])
def test_workers_are_advised_only_where_tuning_the_loader_would_try_some(situations, kind):
    step = epoch(DataLoader(kind(), batch_size=2))
    assert situations.found("workers", step, shares={"data": 0.4, "forward": 0.5}) == []


# Python.


def test_hits_counted_one_by_one_are_asked_for_less_often(situations):
    model, x = net(), torch.ones(32, 4)

    def step() -> int:
        return sum(int(row.argmax()) for row in model(x))

    seen = situations.seen(step, lines={"row.argmax()": 0.6})
    from speedkit_jupyter.profiling.split import Line

    (spot,) = seen.profile.lines.inside
    split = seen.profile.splits[0]
    line = Line(spot.file, spot.number, "__int__")
    split.waits[line], split.waited_s[line] = 32, 0.1
    split.seconds["synchronizations"] = split.pieces["synchronizations", "synchronizations"] = 0.1
    (rule,) = (rule for rule in RULES if rule.name == "synchronizations")
    (one,) = rule.find(seen)
    assert "32 in a step" in one.evidence
    split.waits[line] = 1  # which costs nothing on a CPU
    assert list(rule.find(seen)) == []


def test_a_tensor_of_a_list_counts_where_it_takes_time(situations):
    model, rows = net(), [[1.0] * 4] * 4

    def step() -> None:
        model(torch.tensor(rows))

    (one,) = situations.found("tensor_of_list", step, lines={"torch.tensor(rows)": 0.4})
    assert "torch.tensor(rows)" in one.evidence
    assert situations.found("tensor_of_list", step, lines={"torch.tensor(rows)": 0.01}) == []


def test_collecting_garbage_in_each_step_is_left_out(situations):
    model = net()

    def step() -> None:
        model(torch.ones(2, 4))
        gc.collect()

    (one,) = situations.found("cleaning", step, lines={"gc.collect()": 0.5})
    assert one.gain.high > 1.9


def test_a_state_that_is_copied_in_each_step_is_copied_less_often(situations):
    model = net()

    def step() -> object:
        model(torch.ones(2, 4))
        return copy.deepcopy(model.state_dict())

    (one,) = situations.found("copied_state", step, lines={"copy.deepcopy": 0.5})
    assert one.gain.high == pytest.approx(2.0, rel=0.02)


def test_printing_counts_where_it_takes_time(situations, capsys):
    model = net()

    def step() -> None:
        out = model(torch.ones(2, 4))
        print(out)

    (one,) = situations.found("writing", step, lines={"print(out)": 0.5})
    assert one.title.startswith("print()")
    assert situations.found("writing", step, lines={"print(out)": 0.01}) == []


def test_a_logarithm_is_not_taken_for_a_log(situations):
    model = net()

    def step() -> None:
        torch.log(model(torch.ones(2, 4)).abs())

    assert situations.found("writing", step, lines={"torch.log": 0.5}) == []


def test_a_norm_summed_over_parameters_is_one_call(situations):
    model = net()

    def step() -> float:
        model(torch.ones(2, 4)).sum().backward()
        total = 0.0
        for parameter in model.parameters():
            total += float(parameter.grad.norm()) ** 2
        return total

    (one,) = situations.found("parameter_loops", step, lines={"total += float": 0.5})
    assert "get_total_norm" in one.remedy


def test_samples_that_are_asked_one_by_one_are_asked_at_once(situations, monkeypatch):
    model, rows = net(), torch.ones(16, 4)
    monkeypatch.setattr("speedkit_jupyter.advice.situation.Situation.ratio", lambda *a, **k: 0.5)

    def step() -> None:
        for row in rows:
            model(row.unsqueeze(0))

    (one,) = situations.found("one_by_one", step, shares={"forward": 0.8})
    assert "16 calls" in one.evidence

    def chained() -> None:
        state = torch.ones(1, 4)
        for _ in range(16):
            state = F.pad(model(state), (0, 2))

    assert situations.found("one_by_one", chained, shares={"forward": 0.8}) == []

    def roll_out() -> None:  # made of what the call before has chosen, or not: nobody can say
        seen = torch.ones(1, 4)
        for _ in range(16):
            with torch.no_grad():
                action = model(seen).argmax()
            seen = torch.full((1, 4), float(action))

    (one,) = situations.found("one_by_one", roll_out, shares={"forward": 0.4, "rest": 0.5})
    assert "only where no row is made of what an earlier call gave" in one.risk
    assert one.gain.high < 1.8  # the rest stays


class Moments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x.new_zeros(2, 4)
        for moment in x.unbind(1):
            hidden = self.cell(moment, hidden)
        return hidden


def test_a_cell_that_is_called_for_each_moment_is_a_layer(situations):
    step, modules = trained(Moments(), torch.ones(2, 12, 4)), {"Moments.cell": 0.7}
    (one,) = situations.found("recurrent_cells", step, shares=COMPUTING, modules=modules)
    assert "nn.GRU over" in one.title
    short = trained(Moments(), torch.ones(2, 3, 4))
    assert situations.found("recurrent_cells", short, shares=COMPUTING, modules=modules) == []


def test_a_model_that_is_asked_the_same_twice_is_asked_once(situations):
    model, x = net(), torch.ones(8, 4)

    def step() -> None:
        model(x).sum().backward()
        model(x).argmax(1)

    (one,) = situations.found("same_forward_twice", step, shares=COMPUTING)
    assert one.gain.low > 1.1

    def other() -> None:
        model(x).sum().backward()
        model(x + 1).argmax(1)

    assert situations.found("same_forward_twice", other, shares=COMPUTING) == []


def test_two_passes_that_differ_by_dropout_are_not_the_same(situations):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.ones(8, 4)

    def step() -> None:
        model(x).sum().backward()
        model(x).sum().backward()

    assert situations.found("same_forward_twice", step, shares=COMPUTING) == []


def test_an_input_that_was_changed_in_place_is_another_one(situations):
    model, x = net(), torch.ones(8, 4)

    def step() -> None:
        model(x).sum().backward()
        x.add_(1)
        model(x).sum().backward()

    assert situations.found("same_forward_twice", step, shares=COMPUTING) == []


def test_what_no_other_rule_knows_is_a_slow_line(situations):
    model = net()

    def step() -> int:
        out = model(torch.ones(2, 4))
        return sum(i for i in range(10)) + len(out)

    (one,) = situations.found("slow_lines", step, lines={"return sum(": 0.6})
    assert "60 %" in one.evidence
    assert situations.found("slow_lines", step, lines={"return sum(": 0.05}) == []


# Gradients.


def test_a_prediction_with_a_graph_wants_none(situations):
    model, x = net(), torch.ones(8, 4)

    (one,) = situations.found("no_grad", lambda: model(x), shares={"forward": 0.9})
    assert "no_grad" in one.title

    @torch.no_grad()
    def step() -> torch.Tensor:
        return model(x)

    assert situations.found("no_grad", step, shares={"forward": 0.9}) == []


def test_anomaly_detection_is_turned_off(situations):
    step = trained(net(), torch.ones(8, 4))

    def slow() -> None:
        with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True):
            warnings.simplefilter("ignore")
            step()

    (one,) = situations.found("anomaly_mode", slow, shares=COMPUTING)
    assert one.trial is not None


def test_deterministic_algorithms_are_told_of(situations):
    step = trained(net(), torch.ones(8, 4))
    torch.use_deterministic_algorithms(True)
    try:
        (one,) = situations.found("deterministic", step, shares=COMPUTING)
    finally:
        torch.use_deterministic_algorithms(False)
    assert "rounding" in one.risk


def test_a_profiler_that_was_left_on_is_told_of(situations):
    step = trained(net(), torch.ones(8, 4))
    with torch.autograd.profiler.profile(use_kineto=False):
        seen = situations.seen(step, shares=COMPUTING)
    (rule,) = (rule for rule in RULES if rule.name == "profiler_on")
    assert [one.title for one in rule.find(seen)] == ["turn torch's profiler off"]


def test_losses_that_are_summed_with_their_graphs_are_detached(situations):
    model, x = net(), torch.ones(8, 4)

    def step() -> object:
        total, kept = 0.0, []
        loss = model(x).sum()
        loss.backward()
        total += loss
        kept.append(loss)
        return total

    assert len(situations.found("graph_kept", step, shares=COMPUTING)) == 2

    def quick() -> object:
        total, kept = 0.0, []
        loss = model(x).sum()
        loss += model(x).mean()
        loss.backward()
        total += loss.item()
        kept.append(loss.detach())
        return total

    assert situations.found("graph_kept", quick, shares=COMPUTING) == []


def test_a_graph_of_gradients_that_nobody_asks_for_is_not_made(situations):
    def step(**more: bool) -> Callable[[], object]:
        inner = trained(net(), torch.ones(8, 4), **more)

        def call() -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                inner()

        return call

    (one,) = situations.found("graphs_of_graphs", step(create_graph=True), shares=COMPUTING)
    assert "create_graph" in one.title
    (one,) = situations.found("graphs_of_graphs", step(retain_graph=True), shares=COMPUTING)
    assert "retain_graph" in one.title


def test_a_graph_with_two_backward_passes_is_kept(situations):
    model, x = net(), torch.ones(8, 4)

    def step() -> None:
        out = model(x)
        out.sum().backward(retain_graph=True)
        out.mean().backward()

    assert situations.found("graphs_of_graphs", step, shares=COMPUTING) == []


def test_gradients_that_are_filled_with_zeros_are_let_go(situations):
    model, x = net(), torch.ones(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(x).sum().backward()
        optimizer.step()

    zeroing = {"aten::zero_": 0.1}
    (one,) = situations.found("set_to_none", step, shares=COMPUTING, operators=zeroing)
    assert one.gain.low < 1.1 < one.gain.high


def test_gradients_of_a_body_that_nobody_trains_are_not_computed(situations):
    body, head = net(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    x = torch.ones(8, 4)

    def step() -> None:
        optimizer.zero_grad()
        head(body(x)).sum().backward()
        optimizer.step()

    modules = {"Sequential.0": 0.5, "Sequential.2": 0.2, "Linear": 0.1}
    (one,) = situations.found("frozen_gradients", step, shares=COMPUTING, modules=modules)
    assert one.gain.high > 1.2

    def teacher() -> None:
        with torch.no_grad():
            features = body(x)
        optimizer.zero_grad()
        head(features).sum().backward()
        optimizer.step()

    body.zero_grad()
    assert situations.found("frozen_gradients", teacher, shares=COMPUTING) == []


def test_an_optimizer_that_holds_what_is_frozen_is_told_of(situations):
    model, x = net(), torch.ones(8, 4)
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    shares = {**COMPUTING, "optimizer": 0.1}
    (one,) = situations.found("frozen_in_optimizer", step, shares=shares)
    assert "2 of its 4" in one.evidence


def test_an_input_whose_gradient_nobody_reads_needs_none(situations):
    model = net()

    def step() -> None:
        x = torch.ones(8, 4, requires_grad=True)
        model(x).sum().backward()

    (one,) = situations.found("input_gradients", step, shares=COMPUTING)
    assert one.gain.low == 1.0

    def read() -> torch.Tensor:
        x = torch.ones(8, 4, requires_grad=True)
        model(x).sum().backward()
        return x.grad

    assert situations.found("input_gradients", read, shares=COMPUTING) == []


# Settings.


def test_a_model_in_float64_is_told_of(situations):
    x = torch.from_numpy(np.ones((8, 4)))
    (one,) = situations.found("double_precision", trained(net().double(), x), shares=COMPUTING)
    assert 1.1 < one.gain.low < one.gain.high


class ByHand(nn.Module):
    def __init__(self, is_attention: bool) -> None:
        super().__init__()
        self.mix, self.is_attention = nn.Linear(4, 12), is_attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(x).chunk(3, -1)
        if self.is_attention:
            return attended(q, k, v)
        return torch.softmax(q + k, -1) * v


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(4), -1) @ v


def test_attention_that_is_written_out_has_a_function(situations):
    operators = {"aten::bmm": 0.3, "aten::_softmax": 0.1}
    step = trained(ByHand(True), torch.ones(2, 6, 4))
    (one,) = situations.found("attention_by_hand", step, shares=COMPUTING, operators=operators)
    assert "40 %" in one.evidence
    other = trained(ByHand(False), torch.ones(2, 6, 4))
    found = situations.found("attention_by_hand", other, shares=COMPUTING, operators=operators)
    assert found == []


def test_compiling_again_in_later_calls_is_told_of(situations):
    step = trained(net(), torch.ones(8, 4))
    (one,) = situations.found("recompiling", step, shares={"compiling": 0.5})
    assert one.gain.high > 1.5


def test_what_the_catalog_would_turn_on_counts_by_the_part_that_it_is_about(situations):
    from speedkit_jupyter import Facts, Hardware, plan

    model = net()
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(8, 4)).sum().backward()
        optimizer.step()

    plans = [plan(hardware=Hardware.from_json("cpu"), facts=Facts.read(model, [optimizer]))]
    shares = {"optimizer": 0.5, "forward": 0.2}
    found = situations.found("catalog", step, shares=shares, plans=plans)
    (one,) = (one for one in found if one.variant == "fused_optimizer")
    assert 1.05 < one.gain.low < one.gain.high < 2.0
    applied = frozenset(["fused_optimizer"])
    found = situations.found("catalog", step, shares=shares, plans=plans, in_force=applied)
    assert [one for one in found if one.variant == "fused_optimizer"] == []


def test_a_plan_that_was_learned_needs_no_guess(situations):
    from types import SimpleNamespace

    values = {"name": "fused_optimizer", "values": {"fused_optimizer": True}, "speedup": 1.4,
              "low": 1.3, "high": 1.5, "inputs": ["8×4"]}  # fmt: skip
    import datetime

    learned: Any = SimpleNamespace(
        plan=values, learned_at=datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    )
    step = trained(net(), torch.ones(8, 4))
    (one,) = situations.found("learned", step, shares=COMPUTING, learned=learned)
    assert tuple(one.gain) == (1.3, 1.5)
    assert situations.found("catalog", step, shares=COMPUTING, learned=learned) == []


# What grows, what is asked for one by one, what is made again and again.


def test_growing_copies_are_found_by_what_they_are_assigned_to(situations):
    class Replay:
        def __init__(self) -> None:
            self.memory = torch.zeros(4, 2)

        def push(self, row: torch.Tensor) -> None:
            self.memory = torch.cat([self.memory, row])

    replay, model = Replay(), net()

    def step() -> None:
        replay.push(torch.ones(1, 2))
        model(torch.ones(2, 4)).sum().backward()

    lines = {"self.memory = torch.cat": 0.4}
    (one,) = situations.found("growing_copies", step, lines=lines, more=[Replay.push])
    assert one.gain.low == pytest.approx(1 / (0.6 + 0.4 / 3))
    assert "list that is joined once" in one.remedy


def test_growing_copies_are_silent_about_joining_something_else(situations):
    model = net()

    def step() -> None:
        both = torch.cat([torch.ones(1, 4), torch.zeros(1, 4)])
        model(both).sum().backward()

    lines = {"both = torch.cat": 0.4}
    assert situations.found("growing_copies", step, lines=lines) == []


def test_gradients_one_by_one_are_counted_by_line(situations):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        x = torch.ones(12, 4, requires_grad=True)
        y = model(x)
        rows = []
        for k in range(12):
            rows.append(torch.autograd.grad(y[k, 0], x, create_graph=True)[0][k])
        torch.stack(rows).square().mean().backward()
        optimizer.step()

    lines = {"rows.append": 0.5}
    (one,) = situations.found("gradients_one_by_one", step, lines=lines)
    assert "12 backward passes in a step" in one.evidence


def test_gradients_one_by_one_are_silent_about_one_each_step(situations):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        for _ in range(12):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()

    assert situations.found("gradients_one_by_one", step, lines={".backward()": 0.5}) == []


class Parsed(Dataset[Any]):
    """Each sample is parsed anew, for a while: a step is taken to last a second in all."""

    def __init__(self, random: bool = False) -> None:
        self.random = random

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.04)
        return torch.rand(4) if self.random else torch.zeros(4)


@pytest.mark.real_time
def test_kept_samples_are_those_that_are_the_same_each_time(situations):
    step = epoch(DataLoader(Parsed(), batch_size=8))
    (one,) = situations.found("kept_samples", step, shares={"data": 0.8})
    assert one.gain.high > one.gain.low > 1.2
    assert one.trial is not None
    assert "the first epoch takes as long as now" in one.risk


@pytest.mark.real_time
def test_kept_samples_are_silent_about_augmentation_and_cheap_ones(situations):
    for data in (Parsed(random=True), Squares()):
        step = epoch(DataLoader(data, batch_size=8))
        assert situations.found("kept_samples", step, shares={"data": 0.8}) == []


@pytest.mark.real_time
def test_a_loader_that_the_step_makes_itself_is_seen_but_not_tried(situations):
    model = net()

    def step() -> None:
        for x in DataLoader(Parsed(), batch_size=8):
            model(x).sum().backward()

    seen = situations.seen(step, shares={"data": 0.8})
    seen.loaders, seen.lasting = list(seen.watched.loaders.values()), 0
    rule = next(one for one in RULES if one.name == "kept_samples")
    (one,) = rule.find(seen)
    assert one.trial is None


def test_what_an_optimizer_made_in_the_step_holds_counts_as_trained(situations):
    body, head = nn.Linear(4, 8), nn.Linear(8, 2)
    model = nn.Sequential(body, head)

    def step() -> None:
        optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    (one,) = situations.found("frozen_gradients", step, shares=COMPUTING)
    assert "2 parameters require gradients, and no optimizer holds them" in one.evidence


class Ratings(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20_000, 32, **options), nn.Linear(32, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(rows))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_dense_gradients_of_large_embeddings_count_what_they_write_and_step(situations, optimizer):
    model = Ratings()
    steps = optimizer(model.parameters(), lr=0.1)

    def step() -> None:
        steps.zero_grad()
        model(torch.arange(64)).sum().backward()
        steps.step()

    given = {"shares": {"optimizer": 0.4}, "operators": {"aten::embedding_dense_backward": 0.2}}
    (one,) = situations.found("dense_embeddings", step, **given)
    assert "20,000 rows, of which a step asks 64" in one.evidence
    assert one.gain.low == pytest.approx(1 / 0.7, rel=0.01)
    assert ("SparseAdam" in one.remedy) == (optimizer is torch.optim.Adam)
    assert one.trial is not None


def test_sparse_tables_are_dense_again_after_the_trial(situations):
    model = Ratings()
    seen = situations.seen(trained(model, torch.arange(64)), shares={"optimizer": 0.4})
    (one,) = next(rule for rule in RULES if rule.name == "dense_embeddings").find(seen)
    model.zero_grad()
    with one.trial(seen.subject):
        model(torch.arange(8)).sum().backward()
        assert model.table.weight.grad.is_sparse
    assert not model.table.sparse


def test_embeddings_are_left_alone_where_they_are_sparse_tied_or_asked_for_most_rows(situations):
    tied = Ratings()
    tied.output = nn.Linear(32, 20_000, bias=False)
    tied.output.weight = tied.table.weight
    few = torch.arange(64)
    cases = [(Ratings(sparse=True), few), (tied, few), (Ratings(), torch.arange(10_000))]
    for model, rows in cases:
        shares = {"shares": {"optimizer": 0.4}}
        assert situations.found("dense_embeddings", trained(model, rows), **shares) == []


class Neighbours(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(4, 2)

    def forward(self, pair: Any) -> torch.Tensor:
        x, adjacency = pair
        return adjacency @ self.own(x)


def test_a_matrix_of_zeros_is_named_with_its_size(situations):
    graph, x = torch.eye(1000), torch.ones(1000, 4)
    step = trained(Neighbours(), (x, graph))
    (one,) = situations.found("sparse_products", step, operators={"aten::mm": 0.8})
    assert "(1,000×1,000) is zero in 99.9 %" in one.evidence
    assert one.gain.low == pytest.approx(1 / (0.6 + 0.4 / 2))


def test_matrices_that_are_full_small_sparse_or_all_zero_are_no_matter(situations):
    x = torch.ones(1000, 4)
    for graph in (torch.ones(1000, 1000), torch.eye(1000).to_sparse(), torch.zeros(1000, 1000)):
        step = trained(Neighbours(), (x, graph))
        assert situations.found("sparse_products", step, operators={"aten::mm": 0.8}) == []


def test_parameters_that_are_given_to_numpy_are_no_matter_of_one_call(situations):
    model = net()

    def step() -> None:
        for parameter in model.parameters():
            np.histogram(parameter.detach().numpy())

    assert situations.found("parameter_loops", step, lines={"np.histogram": 0.5}) == []


def test_anomaly_detection_is_off_in_the_trial_where_the_step_turns_it_on_itself(situations):
    step = trained(net(), torch.ones(2, 4))

    def looking() -> None:
        with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True):
            warnings.simplefilter("ignore")
            step()

    seen = situations.seen(looking, shares=COMPUTING)
    (one,) = next(rule for rule in RULES if rule.name == "anomaly_mode").find(seen)
    with one.trial(seen.subject), torch.autograd.set_detect_anomaly(True):
        assert not torch.is_anomaly_enabled()
    assert not torch.is_anomaly_enabled()


def test_deterministic_kernels_are_off_in_the_trial_where_the_step_asks_for_them(situations):
    step = trained(net(), torch.ones(2, 4))
    torch.use_deterministic_algorithms(True)
    try:
        seen = situations.seen(step, shares=COMPUTING)
        (one,) = next(rule for rule in RULES if rule.name == "deterministic").find(seen)
        with one.trial(seen.subject):
            torch.use_deterministic_algorithms(True)
            assert not torch.are_deterministic_algorithms_enabled()
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_closure_that_is_called_with_other_weights_each_time_is_no_second_pass(situations):
    net, x = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1)), torch.rand(256, 64)
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=4)

    def step():
        def closure():
            optimizer.zero_grad()
            loss = net(x).pow(2).mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    assert situations.found("same_forward_twice", step, shares=COMPUTING) == []


# Processes, distributions, optimizers of tables.


def on_processors(seen: Any, real_s: float, used_s: float, preemptions: int) -> Any:
    seen.profile.processor = Processor(real_s, used_s, preemptions)
    (rule,) = (rule for rule in RULES if rule.name == "busy_machine")
    return list(rule.find(seen))


def test_a_step_that_other_processes_keep_from_the_cores_tries_one_thread(situations, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    seen = situations.seen(trained(net(), torch.ones(64, 4)), shares=COMPUTING)
    (one,) = on_processors(seen, 10.0, 1.0, 1000)
    assert "10 times its processor time" in one.evidence
    assert one.variant == "threads:1"
    assert one.allowed.gain.high <= 5.01  # forward and backward: 80 % of the step
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    (one,) = on_processors(seen, 10.0, 1.0, 1000)
    assert not one.variant


def test_a_step_that_sleeps_or_has_its_cores_is_not_kept_from_them(situations):
    seen = situations.seen(trained(net(), torch.ones(64, 4)), shares=COMPUTING)
    assert on_processors(seen, 10.0, 0.5, 20) == []  # sleeps: nobody takes a core away
    assert on_processors(seen, 10.0, 9.0, 1000) == []
    assert on_processors(seen, 10.0, 0.0, 0) == []  # a system that doesn't tell
    waiting = situations.seen(trained(net(), torch.ones(64, 4)), shares={"data": 0.9})
    assert on_processors(waiting, 10.0, 1.0, 1000) == []


def policy(**more: Any) -> Callable[[], object]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        chosen = torch.distributions.Normal(model(torch.ones(64, 4)), 1.0, **more)
        optimizer.zero_grad()
        chosen.log_prob(torch.ones(64, 2)).sum().backward()
        optimizer.step()

    return step


def test_checks_of_distributions_are_off_in_the_trial_and_on_after_it(situations):
    from torch.distributions import Distribution

    seen = situations.seen(policy(), shares=COMPUTING)
    seen.watched.checks_s = 0.24 * seen.step_s * seen.steps
    (rule,) = (rule for rule in RULES if rule.name == "distribution_checks")
    (one,) = rule.find(seen)
    assert "2 checks" in one.evidence
    assert "24 %" in one.evidence
    assert one.gain.high < 1 / (1 - 0.24)
    with one.trial(seen.subject):
        assert not torch.distributions.Normal(0.0, 1.0)._validate_args
    assert Distribution._validate_args
    seen.watched.checks_s = 0.01 * seen.step_s * seen.steps
    assert list(rule.find(seen)) == []


def test_adam_of_the_rows_that_were_asked_for_is_adam_of_all_where_none_was_stepped_before():
    from speedkit_jupyter.advice.opportunity import Subject
    from speedkit_jupyter.advice.rules.trials import sparse_tables

    def steps(tried: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(100, 4), nn.Linear(4, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        with sparse_tables(Subject([model], [optimizer])) if tried else contextlib.nullcontext():
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.tensor([3, 3, 7])).pow(2).sum().backward()
                optimizer.step()
        gradients = [one.grad.to_dense() for one in model.parameters()]
        return [*model.parameters(), *gradients, optimizer.state[model[0].weight]["exp_avg_sq"]]

    for tried, plain in zip(steps(True), steps(False), strict=True):
        torch.testing.assert_close(tried, plain)


def test_waits_that_are_a_thousandth_of_the_step_are_no_opportunity(situations):
    """All of `generate` is one line of the user's: what goes on inside of it is not waiting."""
    model, x = net(), torch.ones(32, 4)

    def step() -> object:
        return model(x)

    from speedkit_jupyter.profiling.split import Line

    seen = situations.seen(step, shares={"forward": 0.9}, lines={"model(x)": 0.95})
    (spot,) = seen.profile.lines.inside
    split, line = seen.profile.splits[0], Line(spot.file, spot.number, "item")
    split.waits[line], split.waited_s[line] = 64, 0.001
    split.seconds["synchronizations"] = split.pieces["synchronizations", "synchronizations"] = 0.001
    (rule,) = (rule for rule in RULES if rule.name == "synchronizations")
    assert list(rule.find(seen)) == []

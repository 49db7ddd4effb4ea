"""Test that each rule reports its own reason, and nothing if the reason doesn't apply."""

import ast
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from situations import found, seen
from torch import nn
from torch.utils.data import DataLoader

from speedkit_jupyter.extras.advise.advice import Subject
from speedkit_jupyter.extras.advise.rules import RULES
from speedkit_jupyter.extras.advise.rules.data import other_loader
from speedkit_jupyter.extras.advise.rules.models import without_gradients
from speedkit_jupyter.extras.advise.situation import Situation, code_of, dotted
from speedkit_jupyter.extras.data.loader_settings import LoaderSettings

COMPUTING = {"forward": 0.4, "backward": 0.4}
TRAINS = {"shares": COMPUTING}
TRAIN = "opt.zero_grad(); model(x).sum().backward(); opt.step()"


def epoch(loader: str) -> str:
    return f"""
        loader = {loader}
        def step():
            for batch in loader:
                x = batch[0] if isinstance(batch, list | tuple) else batch
                {TRAIN}
    """


def trained(model: str, x: str, optimizer: str = "torch.optim.SGD") -> str:
    return f"""
        model, x = {model}, {x}
        opt = {optimizer}(model.parameters(), lr=0.1)
        def step():
            {TRAIN}
    """


def waiting(share: float) -> dict[str, Any]:
    return {"shares": {"data": share, "forward": 0.5}}


ATTENTION = """
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(4, 12)
        def forward(self, x):
            q, k, v = self.mix(x).chunk(3, -1)
            return {}
    model, x = Mixed(), torch.ones(2, 6, 4)
    def step():
        model(x).sum().backward()
"""
FROZEN = """
    body, head = net(), nn.Linear(2, 2)
    opt = torch.optim.SGD(head.parameters(), lr=0.1)
    def step():
        opt.zero_grad()
        {}
        opt.step()
"""
TEACHER = FROZEN.format("with torch.no_grad(): y = body(x)\n        head(y).sum().backward()")
SUMMED = """
    total, kept = 0.0, []
    def step():
        global total
        loss = model(x).sum()
        loss.backward()
        {}
"""
ADAPTED = """
    class Adapted(nn.Module):
        def __init__(self, p):
            super().__init__()
            self.gradient_checkpointing = p == 0.0
            self.base_layer, self.lora_dropout = nn.Linear(4, 4), nn.Dropout(p)
        def forward(self, x):
            return self.base_layer(self.lora_dropout(x))
    model = Adapted({})
    def step():
        model(x).sum().backward()
"""
LOADED = """
    from types import SimpleNamespace
    body, model = nn.Linear(4, 4).requires_grad_(False), nn.Sequential(nn.Linear(4, 4))
    model.append(body)
    body.config = SimpleNamespace(dtype={}, quantization_config={})
    def step():
        model(x).sum().backward()
"""
LENGTHS = """
    model = Table(8)
    {}
    def step():
        for length in (7, 8, 16, 21, 39, 44):
            model(torch.ones(2, length).long())
"""
LOGITS = """
    from types import SimpleNamespace
    kept = []
    def step():
        with torch.no_grad():
            out = SimpleNamespace(logits=model(x))
        kept.append({})
"""
PARTS = """
    def step():
        total = 0.0
        for part in x.chunk(4):
            loss = model(part).sum()
            loss.backward()
            total += loss
        return total
"""
ONE_STEP = """
            loss = 0.0
            for row in part.chunk(2):
                l = model(row).sum()
                l.backward()
                loss += l
            opt.step()
"""
STEPS = f"""
    def one_step(part):
        {ONE_STEP.strip().replace("    " * 3, "    " * 2)}
    def step():
        for part in x.chunk(4):
            {{}}
"""
ROLL_OUT = """
    seen = torch.ones(1, 4)
    for _ in range(16):
        with torch.no_grad():
            action = model(seen).argmax()
        seen = torch.full((1, 4), float(action))
"""
CASES: list[tuple[str, str, dict[str, Any], str | None]] = [
    ("workers", epoch("DataLoader(Squares(), 2)"), waiting(0.4), "40 %"),
    ("workers", epoch("DataLoader(Stream(), 2)"), waiting(0.4), None),
    ("workers", epoch("DataLoader(TensorDataset(torch.ones(8, 4)), 2)"), waiting(0.4), None),
    ("workers", epoch("DataLoader(Squares(), 2)"), waiting(0.4) | {"hardware": "one_core"}, None),
    # tune_loader() wouldn't try workers with this data set either.
    ("workers", epoch("DataLoader(OwnNumbers(), 2)"), waiting(0.4), None),
    ("in_memory", epoch("DataLoader(TensorDataset(torch.ones(8, 4)), 2)"), waiting(0.5), "50 %"),
    ("in_memory", epoch("DataLoader(TensorDataset(torch.ones(8, 4)), 2, collate_fn="
                        "lambda rows: torch.stack([r[0] for r in rows]))"), waiting(0.5), None),
    ("padding", trained("Table(8)", "words(8)"), TRAINS, "75 %"),
    ("padding", trained("Table(8)", "words(30)"), TRAINS, None),
    ("padding", trained("Table(8)", "words(8).index_fill(0, torch.tensor([0]), 1)"), TRAINS,
     "put rows of similar length together"),
    ("many_lengths", LENGTHS.format("model.compile(backend='eager')"), TRAINS, "(8, 16, 40, 48)"),
    ("many_lengths", LENGTHS.format("pass"), TRAINS, None),
    # The attention mask is all ones, for rows without padding and for padded rows.
    ("padding", "model = Table(8); words = torch.randint(1, 8, (4, 32))\ndef step():\n"
     "    model(words, attention_mask=torch.ones_like(words)).sum().backward()", TRAINS, None),
    ("padding", "model = Table(8)\nwords = words(8)\ndef step():\n"
     "    model(words, attention_mask=torch.ones_like(words)).sum().backward()", TRAINS, "75 %"),
    ("tensor_of_list", "model(torch.tensor([[1.0] * 4] * 4))", {"lines": {"torch.tensor": 0.4}},
     "torch.tensor([[1.0] * 4] * 4)"),
    ("cleaning", "model(x)\ngc.collect()", {"lines": {"gc.collect()": 0.5}}, "50 %"),
    ("copied_state", "model(x)\ncopy.deepcopy(model.state_dict())", {"lines": {"deepcopy": 0.5}},
     "50 %"),
    ("writing", "out = model(x)\nprint(out)", {"lines": {"print(": 0.5}}, "print() every"),
    ("parameter_loops", "model(x).sum().backward()\ntotal = 0.0\nfor p in model.parameters():\n"
     "    total += float(p.grad.norm()) ** 2", {"lines": {"total +=": 0.5}}, "get_total_norm"),
    ("parameter_loops", "for p in model.parameters():\n    np.histogram(p.detach().numpy())",
     {"lines": {"np.histogram": 0.5}}, None),
    ("growing_copies", "all = torch.zeros(4, 2)\nall = torch.cat([all, model(x)])",
     {"lines": {"torch.cat": 0.4}}, "rows in a list and join it once"),
    ("growing_copies", "both = torch.cat([x, x])\nmodel(both)", {"lines": {"torch.cat": 0.4}},
     None),
    ("slow_lines", "model(x)\nsum(i for i in range(10))", {"lines": {"sum(i": 0.6}}, "60 %"),
    ("no_grad", "model(x)", {"shares": {"forward": 0.9}}, "torch.no_grad()"),
    ("no_grad", "with torch.no_grad(): model(x)", {"shares": {"forward": 0.9}}, None),
    ("anomaly_mode", f"with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True):\n"
     f"    warnings.simplefilter('ignore'); {TRAIN}", TRAINS, "80 %"),
    ("graph_kept", "total, loss = 0.0, model(x).sum()\nloss += model(x).mean()\nloss.backward()\n"
     "total += loss.item(); [].append(loss.detach())", TRAINS, None),
    ("graph_kept", SUMMED.format("total += loss"), TRAINS, "`total += loss`"),
    ("graph_kept", SUMMED.format("kept.append(loss)"), TRAINS, "`kept.append(loss)`"),
    # A loss may be summed over the parts of one step, not over the steps of an epoch.
    ("graph_kept", PARTS, TRAINS, None),
    ("graph_kept", PARTS.replace("loss.backward()", "loss.backward(); opt.step()"), TRAINS,
     "`total += loss`"),
    # A loss is summed over the parts of each step, in a function and in a loop over steps.
    ("graph_kept", STEPS.format("one_step(part)"), TRAINS, None),
    ("graph_kept", STEPS.format(ONE_STEP), TRAINS, None),
    ("frozen_gradients", FROZEN.format("head(body(x)).sum().backward()"), TRAINS,
     "4 parameters require gradients"),
    ("frozen_gradients", FROZEN.format("head(body(x)).sum().backward()"), TRAINS,
     "body.requires_grad_(False)"),
    ("frozen_gradients", TEACHER, TRAINS, None),
    ("frozen_gradients", "opt = torch.optim.SGD(model[2].parameters(), lr=0.1)\n"  # in the step
     "model(x).sum().backward(); opt.step()", TRAINS, "2 parameters require"),
    ("double_precision", trained("net().double()", "torch.from_numpy(np.ones((8, 4)))"),
     TRAINS, "float64"),
    ("attention_by_hand", ATTENTION.format("torch.softmax(q @ k.transpose(-2, -1), -1) @ v"),
     {"operators": {"aten::bmm": 0.3, "aten::_softmax": 0.1}}, "40 %"),
    ("adapter_dropout", ADAPTED.format(0.1), {"operators": {"aten::native_dropout": 0.2}}, "20 %"),
    ("adapter_dropout", ADAPTED.format(0.0), {"operators": {"aten::native_dropout": 0.2}}, None),
    ("needless_checkpointing", ADAPTED.format(0.0), TRAINS, "gradient checkpointing is on"),
    ("needless_checkpointing", ADAPTED.format(0.1), TRAINS, None),
    ("needless_float32", LOADED.format("torch.bfloat16", None), TRAINS, "2 frozen weights"),
    ("needless_float32", LOADED.format("torch.float32", None), TRAINS, None),
    ("needless_float32", LOADED.format("'bfloat16'", {"bits": 4}), TRAINS, None),
    ("kept_logits", LOGITS.format("out.logits"), {}, "`kept.append(out.logits)`"),
    ("kept_logits", LOGITS.format("out.logits.argmax(-1)"), {}, None),
    ("attention_by_hand", ATTENTION.format("torch.softmax(q + k, -1) * v"),
     {"operators": {"aten::bmm": 0.3}}, None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "code", "given", "says"),
    CASES,
    ids=[f"{rule}-{'speaks' if says else 'silent'}" for rule, _, _, says in CASES],
)
def test_a_rule_speaks_of_its_own_reason_alone(capsys, rule, code, given, says):
    said = found(rule, code, **given)
    if says is None:
        assert said == []
    else:
        (one,) = said
        assert says in "\n".join((one.title, one.evidence, one.remedy, one.risk))


def test_the_code_of_a_lambda_is_read():
    (code,) = code_of({(lambda: torch.zeros(2)).__code__: 1})
    assert [dotted(call.func) for call in code.nodes(ast.Call)] == ["torch.zeros"]


def test_every_rule_has_a_test_and_a_line_of_the_docs():
    source = Path(__file__).read_text(encoding="utf-8")
    assert [name for name in RULES if f'"{name}"' not in source] == []
    page = Path(__file__).parents[3] / "docs" / "advice.md"
    listed = re.findall(r"^\| `(\w+)` \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(RULES)


@pytest.mark.parametrize("rule", RULES)
def test_no_rule_has_anything_against_a_healthy_step(rule):
    step = trained("net()", "torch.ones(64, 4)")
    assert found(rule, step, shares={**COMPUTING, "optimizer": 0.1}) == []


def test_workers_that_start_for_each_loop_are_kept():
    situation = seen(epoch("DataLoader(Squares(), 2)"), shares={"data": 0.5})
    (draws,) = situation.observed.draws.values()
    loader, rule = draws.loader, RULES["worker_start"]
    draws.next_s, draws.waited_s = [0.1, 0.01, 0.01, 0.01], 0.25
    assert list(rule(situation)) == []  # the loader has no workers
    loader.num_workers = 2
    (one,) = rule(situation)
    assert one.gain.high > 1.1


def test_samples_that_are_asked_one_by_one_are_asked_at_once(monkeypatch):
    monkeypatch.setattr(Situation, "ratio", lambda *_, **__: 0.5)  # one call halves the time
    step = "for row in torch.ones(16, 4):\n    model(row.unsqueeze(0))"
    (one,) = found("one_by_one", step, shares={"forward": 0.8})
    assert "16 calls" in one.evidence
    chained = "y = torch.ones(1, 4)\nfor _ in range(16):\n    y = F.pad(model(y), (0, 2))"
    assert found("one_by_one", chained, shares={"forward": 0.8}) == []
    # The rule can't know whether a call's input depends on the result of the call before.
    (one,) = found("one_by_one", ROLL_OUT, shares={"forward": 0.4, "rest": 0.5})
    assert "only if no row depends on an earlier call's result" in one.risk
    assert one.gain.high < 1.8  # the time of the rest remains


@pytest.mark.parametrize(("times", "seconds", "is_said"), [(32, 0.1, True), (1, 0.1, False),
                                                            (64, 0.001, False)])  # fmt: skip
def test_waits_count_where_there_are_many_and_they_take_time(times, seconds, is_said):
    """Don't count the time of a whole line: on a CPU, a call of `generate()` mostly computes."""
    situation = seen("model(x)", shares={"forward": 0.5}, lines={"model(x)": 0.4})
    ((spot, _),) = situation.profile.lines.own
    split, line = situation.profile.splits[0], (spot, "item")
    split.waits[line] = [seconds / times] * times
    split.pieces["synchronizations", "synchronizations"] = seconds
    said = list(RULES["synchronizations"](situation))
    assert [f"{times} in a step" in one.evidence for one in said] == [True] * is_said


def test_parameters_that_are_not_trained_require_gradients_again_after_the_trial():
    body, head = nn.Linear(4, 4), nn.Linear(4, 2)
    subject = Subject([body, head], [torch.optim.SGD(head.parameters(), lr=0.1)])
    with without_gradients(subject):
        assert not any(one.requires_grad for one in body.parameters())
        assert all(one.requires_grad for one in head.parameters())
    assert all(one.requires_grad for one in body.parameters())


def test_a_trial_of_few_lengths_pads_batches_and_leaves_the_loader():
    loader = DataLoader([torch.ones(length).long() for length in (7, 8, 21)])
    subject = Subject(loaders=[loader])
    trial = other_loader(SimpleNamespace(subject=subject), loader, LoaderSettings(), (8, 32))
    with trial(subject):
        assert [batch.shape[1] for batch in loader] == [8, 8, 32]
    assert [batch.shape[1] for batch in loader] == [7, 8, 21]

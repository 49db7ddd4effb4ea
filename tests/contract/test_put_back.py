"""Test each line of "Put back after a measurement" in docs/contract.md, with several inputs."""

import logging
import random
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from speedkit_jupyter import attention, benchmark, check, rollout

PRELUDE = """
import array, collections, copy, ctypes, mmap, os, random, sys, threading, types, warnings
import numpy as np
import torch
from torch import nn
from dataclasses import dataclass, field


class Plain:
    total = 0
    def __init__(self): self.n, self.log, self.inner = 0, [], {"a": [0]}


class Slotted:
    __slots__ = ("n", "late")
    def __init__(self): self.n = 0


@dataclass
class Record:
    n: int = 0
    log: list = field(default_factory=list)


def fresh():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    return model, torch.optim.AdamW(model.parameters()), torch.randn(4, 8)


model, optimizer, x = fresh()
"""
TRAIN = "loss = model(x).pow(2).mean(); loss.backward(); optimizer.step(); optimizer.zero_grad()"


def picture(value: Any) -> Any:
    """Return an object that compares equal only if values, types, order and layouts are equal."""
    if isinstance(value, torch.Tensor):
        kept = value.detach()
        dense = kept.to_dense() if kept.layout is not torch.strided else kept
        kind = type(value), value.dtype, value.layout, tuple(dense.stride())
        return *kind, dense.tolist(), picture(value.grad)
    if isinstance(value, np.ndarray):
        return value.dtype, value.strides, value.tolist()
    if isinstance(value, dict):
        return type(value), [(picture(key), picture(one)) for key, one in value.items()]
    if isinstance(value, list | tuple | deque):
        return type(value), [picture(one) for one in value]
    is_simple = isinstance(value, int | float | str | bytes | type(None))
    return type(value), value if is_simple else str(value)


# A case has code before the step, code of the step, and an expression that must not change.
CASES: dict[str, list[tuple[str, str, str]]] = {
    "tensors": [
        ("t = torch.zeros(3)", "t.add_(1)", "t"),
        ("t = torch.zeros(2, 3).t()", "t.data = torch.ones(3, 2)", "t"),
        ("t = torch.ones(3, requires_grad=True)", "t.sum().backward()", "t"),
        ("t = torch.eye(3).to_sparse()", "t.values().add_(1)", "t"),
        ("t = torch.zeros(8); view = t[2:4]", "view.fill_(5)", "[t, view]"),
    ],
    "modules": [
        ("", "pass", "model.state_dict()"),
        ("", "pass", "[p.grad for p in model.parameters()]"),
        ("", "model.eval()", "[m.training for m in model.modules()]"),
        ("model.seen = 0", "model.seen += 1", "model.seen"),
        ("", "model[0].weight.requires_grad_(False)", "model[0].weight.requires_grad"),
        ("", "model.register_forward_hook(lambda *given: None)", "len(model._forward_hooks)"),
        ("other = nn.Linear(2, 2)", "other.weight.data.mul_(2)", "other.state_dict()"),
        ("m = torch.jit.trace(nn.BatchNorm1d(8), x, check_trace=False)", "m(x)", "m.state_dict()"),
        ("m = torch.jit.script(nn.Linear(8, 2))", "m.weight.data.add_(1)", "m.state_dict()"),
        ("", "nn.modules.module.register_module_forward_hook(lambda *given: None)",
         "len(nn.modules.module._global_forward_hooks)"),
    ],
    "optimizers": [
        ("", "pass", "optimizer.state_dict()['state']"),
        ("", "optimizer.param_groups[0]['lr'] *= 0.9", "optimizer.param_groups[0]['lr']"),
        ("schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)", "schedule.step()",
         "[schedule.state_dict()['last_epoch'], optimizer.param_groups[0]['lr']]"),
        ("scaler = torch.amp.GradScaler('cpu')", "scaler.scale(x); scaler.update(128.0)",
         "scaler.state_dict()['scale']"),
    ],
    "containers": [
        ("log = []", "log.append(float(model[0].weight.sum()))", "log"),
        ("log = {'b': 1, 'a': [0]}", "log.pop('b'); log['b'] = 2; log['a'].append(1)", "log"),
        ("log = {1, 2}", "log.add(len(log))", "sorted(log)"),
        ("log = collections.deque([1], 2)", "log.append(3)", "log"),
        ("log = collections.defaultdict(list)", "log['x'].append(1)", "log"),
        ("log = collections.Counter('a')", "log['a'] += 1", "log"),
        ("log = bytearray(b'abc')", "log.append(1)", "bytes(log)"),
        ("log = array.array('i', [1])", "log.append(1)", "list(log)"),
        ("log = mmap.mmap(-1, 2)", "log[0] += 1", "log[:]"),
        ("log = (ctypes.c_int * 2)()", "log[0] += 1", "list(log)"),
    ],
    "instances": [
        ("one = Plain()", "one.n += 1; one.log.append(1); one.inner['a'][0] = 7", "vars(one)"),
        ("one = Plain()", "Plain.total += 1", "Plain.total"),
        ("one = Slotted()", "one.n += 1; one.late = 3", "[one.n, hasattr(one, 'late')]"),
        ("one = Record()", "one.n += 1; one.log.append(one.n)", "[one.n, one.log]"),
        ("one = types.SimpleNamespace(n=0)", "one.n += 1; one.new = 1", "vars(one)"),
        ("one = Plain()", "del one.n; one.n = 1", "vars(one)"),
        ("one = threading.local()", "one.n = 1", "vars(one)"),
    ],
    "arrays": [
        ("a = np.zeros(3)", "a[0] += 1", "a"),
        ("a = np.zeros((2, 3)); row = a[1]", "row[:] = 7", "a"),
        ("a = np.array(['x', None], dtype=object)", "a[0] = 'y'", "a"),
    ],
    "names": [
        ("n = 0", "n += 1", "n"),
        ("t = torch.zeros(2)", "t = t + 1", "t"),
        ("text = 'a'", "text = text + 'b'", "text"),
        ("def count():\n    global n\n    n += 1\nn = 0", "count()", "n"),
        ("n = 0", "globals()['n'] += 1; globals()['new'] = 1", "[n, 'new' in globals()]"),
        ("text = 'a'", "exec('text = 1; log = 2', globals())", "[text, 'log' in globals()]"),
        ("def count(n=0): pass", "count.__defaults__ = (1,)", "count.__defaults__"),
        ("made = sys.modules['made'] = types.ModuleType('made'); made.log, made.n = [], 0",
         "from made import log; import made as m; log.append(1); m.n += 1",
         "[made.log, made.n]"),
        ("def make(k):\n    def count():\n        nonlocal k\n        k += 1\n    return count\n"
         "count = make(0)", "count()", "count.__closure__[0].cell_contents"),
    ],
    "iterators": [
        ("i = iter([1, 2, 3, 4])", "next(i)", "list(copy.copy(i))"),
        ("i = iter(torch.utils.data.DataLoader(torch.arange(9.0), shuffle=True))", "next(i)",
         "torch.stack(list(i)).sum().item()"),
        ("i = (k for k in range(9))", "next(i)", "list(i)"),
        ("i = enumerate('abc')", "next(i)", "list(i)"),
    ],
    "random generators": [
        ("random.seed(1)", "random.random()", "str(random.getstate())"),
        ("np.random.seed(1)", "np.random.rand()", "str(np.random.get_state())"),
        ("torch.manual_seed(1)", "torch.rand(1)", "torch.get_rng_state()"),
        ("g = np.random.default_rng(0)", "g.random()", "str(g.bit_generator.state)"),
        ("g = torch.Generator().manual_seed(1)", "torch.rand(1, generator=g)", "g.get_state()"),
        ("g = random.Random(3)", "g.random()", "str(g.getstate())"),
    ],
    "switches of torch": [
        ("", "torch.set_default_dtype(torch.float64)", "str(torch.get_default_dtype())"),
        ("", "torch.use_deterministic_algorithms(True)",
         "torch.are_deterministic_algorithms_enabled()"),
        ("", "torch.set_grad_enabled(True)", "torch.is_grad_enabled()"),
        ("", "torch.set_float32_matmul_precision('medium')",
         "torch.get_float32_matmul_precision()"),
        ("", "torch.autograd.set_detect_anomaly(False, check_nan=False)",
         "torch.is_anomaly_check_nan_enabled()"),
        *(
            ("", f"torch.{name} = {value!r}", f"torch.{name}")
            for name, value in {
                "backends.cudnn.enabled": False,
                "backends.cudnn.benchmark_limit": 3,
                "backends.mkldnn.enabled": False,
                "backends.mkldnn.deterministic": True,
                "backends.opt_einsum.enabled": False,
                "utils.deterministic.fill_uninitialized_memory": False,
            }.items()
        ),
    ],
    "process": [
        ("", "os.environ['SPEED_TEST'] = '1'", "os.environ.get('SPEED_TEST')"),
        ("", "os.environ.pop('HOME', None)", "os.environ.get('HOME')"),
        ("", "os.chdir('/')", "os.getcwd()"),
        ("", "warnings.simplefilter('ignore')", "len(warnings.filters)"),
    ],
}  # fmt: skip


def measured(cases: list[tuple[str, str, str]]) -> Iterator[tuple[str, Any, Any]]:
    """Measure a step that runs all `cases`; yield each case's step, and its probe's two values."""
    step_names: dict[str, Any] = {"__name__": "__main__"}
    exec(PRELUDE, step_names)
    each = []
    for index, (before, step, probe) in enumerate(cases):
        pair = []
        for _ in ("before", "after"):  # one copy each, as a probe may consume an iterator
            names: dict[str, Any] = {"__name__": "__main__"}
            exec(PRELUDE + before, names)
            assigned = sorted(set(compile(step, "", "exec").co_names) & {"n", "t", "a", "text"})
            rebinds = f"    global {', '.join(assigned)}\n" if assigned else ""
            body = step if "set_default_dtype" in step else f"{step}\n    {TRAIN}"
            exec(f"def act():\n{rebinds}    {body}", names)
            pair.append(names)
        step_names[f"act{index}"] = pair[1]["act"]
        each.append((step, probe, *pair))
    calls = "; ".join(f"act{index}()" for index in range(len(cases)))
    exec(f"def step():\n    {TRAIN}\n    {calls}", step_names)
    before = [picture(eval(probe, untouched)) for _, probe, untouched, _ in each]
    benchmark(step_names["step"], ["baseline", "bf16"], budget_s=0.2)
    for (step, probe, _, names), found in zip(each, before, strict=True):
        yield step, found, picture(eval(probe, names))


@pytest.mark.long
@pytest.mark.parametrize("line", CASES)
@pytest.mark.filterwarnings("ignore")
def test_what_a_step_changes_is_as_before(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SPEED_TEST", raising=False)
    monkeypatch.setitem(sys.modules, "made", None)  # one case creates the module
    for step, before, after in measured(CASES[line]):
        assert after == before, step


def test_a_step_logs_to_no_file_and_what_handlers_collect_goes(tmp_path, monkeypatch) -> None:
    class Collecting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            vars(self).setdefault("lines", []).append(record)

    logger, model = logging.getLogger("of_a_step"), torch.nn.Linear(2, 2)
    to_file, collecting = logging.FileHandler(tmp_path / "log"), Collecting()
    monkeypatch.setattr(logger, "handlers", [to_file, collecting])
    logger.error("before")
    benchmark(lambda: (logger.error("step"), model(torch.ones(1, 2))), "baseline", budget_s=0.1)
    logger.error("after")
    to_file.close()
    assert (tmp_path / "log").read_text().split() == ["before", "after"]
    assert len(vars(collecting)["lines"]) == 2


def test_a_check_puts_back_what_both_change() -> None:
    norm, log = torch.nn.BatchNorm1d(4), [0]

    def reference(x: torch.Tensor) -> torch.Tensor:
        log.append(random.random())  # type: ignore[arg-type]
        return norm(x)

    before = picture(norm.state_dict()), random.getstate(), [*log]
    assert check(reference, reference, lambda: torch.randn(8, 4), budget_s=1e4).passed
    assert (picture(norm.state_dict()), random.getstate(), log) == before


@pytest.mark.parametrize(
    "tune",
    [
        lambda x: attention(x, x, x, "causal", tune=True),
        lambda x: rollout(torch.nn.GELU(), x, 2, tune=True, budget_s=0.1),
    ],
)
def test_tuning_draws_from_no_generator_of_the_users(tune: Callable[[torch.Tensor], Any]) -> None:
    x = torch.rand(1, 2, 64, 8)
    before = random.getstate(), torch.get_rng_state().tolist()
    tune(x)
    assert (random.getstate(), torch.get_rng_state().tolist()) == before


ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/contract.md").read_text(encoding="utf-8")


def test_each_named_test_file_exists() -> None:
    named = set(re.findall(r"`(tests/[\w/]+\.py)`", PAGE))
    assert len(named) >= 6
    assert not [name for name in named if not (ROOT / name).exists()]


def test_the_page_lists_what_is_put_back_and_nothing_else() -> None:
    part = PAGE.partition("## Put back")[2].partition("\n## ")[0]
    assert re.findall(r"^\| ([a-z ]+) \|", part, re.MULTILINE)[1:] == list(CASES)

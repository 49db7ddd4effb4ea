"""Check that every optimization in the catalog keeps the catalog's contract."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn
from training import everything

from speedkit_jupyter import Facts, Hardware, SpeedConfig, apply_speedups, machines, plan
from speedkit_jupyter.catalog import CATALOG, find, named
from speedkit_jupyter.catalog.base.decision import Decision, Effect
from speedkit_jupyter.catalog.base.target import Target
from speedkit_jupyter.catalog.facts.model import OptimizerFacts
from speedkit_jupyter.machines import flags
from speedkit_jupyter.plans.context import observed
from speedkit_jupyter.torchglue import dynamo as torch_private

MACHINES = machines.names()
every = pytest.mark.parametrize("optimization", CATALOG, ids=lambda one: one.name)


def here(optimization) -> tuple:
    """Return a network, optimizers, and a value that changes them, or None if no value does."""
    plain, (model, optimizer) = Hardware.from_json("cpu"), network()
    for predicts, optimizers in ((False, [optimizer]), (True, [])):  # training, then inference
        model.train(not predicts)
        facts = Facts.read(model, optimizers)
        for value in values(optimization):
            request = SpeedConfig(**{optimization.name: value}).request(optimization.name)
            if optimization.decide(request, plain, facts).active:
                return model, optimizers, value
    model, optimizer = network()
    return model, [optimizer], None


def is_here(optimization) -> bool:
    return not optimization.library or optimization.library in Hardware.detect().libraries


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a CNN with batch norm, GELU, a linear layer, two blocks, and a stepped optimizer."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)) for _ in range(2)]
    layers = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Flatten(), nn.Linear(36, 3)]
    model = nn.Sequential(*layers, *blocks)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(2, 2, 5, 5)).sum().backward()
    optimizer.step()
    return model, optimizer


def values(optimization) -> list:
    found = [{"true": True, "false": False}.get(word, word) for word in optimization.words]
    extra = {"threads": [1, 64], "device": ["auto", "cpu", "cuda", "cuda:3", "mps", "xpu"]}
    return found + extra.get(optimization.name, [])


@every
def test_decide_gives_a_reason_on_every_machine_for_every_request_and_touches_nothing(optimization):
    before = flags.snapshot()
    facts = (
        Facts(),
        Facts(device="cuda:0", parameters=10, convolutions=2, lstms=1,
              precision="fp16", optimizers=(OptimizerFacts(),)),
        Facts(dtypes=("float16",), parameters=10, compiled="script",
              optimizers=(OptimizerFacts(sparse_gradients=True),)),
    )  # fmt: skip
    for machine in MACHINES:
        hardware = Hardware.from_json(machine)
        for value in values(optimization):
            request = SpeedConfig(**{optimization.name: value}).request(optimization.name)
            for one in facts:
                decision = optimization.decide(request, hardware, one)
                assert decision.reason.strip()
                assert decision.name == optimization.name
                assert not (decision.declined and request.source == "auto")
    assert flags.diff(before, flags.snapshot()) == ()


@every
def test_candidates_are_values_that_the_config_accepts(optimization):
    facts = Facts(device="cuda:0", parameters=10, convolutions=1, optimizers=(OptimizerFacts(),))
    both = (facts, Facts(convolutions=1, optimizers=(OptimizerFacts(),)))
    pairs = itertools.product(map(Hardware.from_json, MACHINES), both)
    found = [value for pair in pairs for value in optimization.candidates(*pair)]
    if not found:
        pytest.skip("no search tries it")
    for candidate in found:
        assert SpeedConfig(**{optimization.name: candidate}).request(optimization.name).explicit


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ending", [None, ValueError, KeyboardInterrupt])
@every
def test_what_was_applied_is_taken_back_exactly(optimization, ending):
    torch_private.import_compiler()  # so that each snapshot has its flags
    name = optimization.name
    model, optimizers, value = here(optimization)
    if value is None:
        pytest.skip("nothing to do for it on a CPU")
    before = everything(model, *optimizers)
    config = SpeedConfig(**{name: value})
    try:
        with apply_speedups(model, config, optimizer=optimizers)[1] as context:
            assert context.plan[name].active
            assert context.changes()
            if ending is not None:
                raise ending
    except (ValueError, KeyboardInterrupt):
        pass
    assert everything(model, *optimizers) == before


SWITCHED = ("activation_checkpointing", "channels_last", "inference")
LAYERED = {**dict.fromkeys(SWITCHED, True), "int8": "weights"}


@pytest.mark.parametrize("order", itertools.permutations(range(3)), ids=str)
@pytest.mark.parametrize("name", [*filter(find, LAYERED)])
def test_plans_on_a_model_and_its_parts_are_taken_back_in_any_order(name, order):
    if not is_here(named(name)):
        pytest.skip(f"needs {named(name).library}")
    model = network()[0].eval()
    before, config = everything(model), SpeedConfig(**{name: LAYERED[name]}).alone()
    parts = (model, nn.Sequential(model[0], *model[2:]).eval(), model)
    contexts = [apply_speedups(part, config)[1] for part in parts]
    assert all(context.changes() for context in contexts[:1])
    for number in order:
        contexts[number].restore()
    assert everything(model) == before


@every
def test_what_is_expected_is_what_is_so_once_it_is_applied(optimization):
    torch_private.import_compiler()  # so that each snapshot has its flags
    if not is_here(optimization):
        pytest.skip(f"needs {optimization.library}")
    model, optimizers, able = here(optimization)
    target = Target(model, optimizers)
    facts = Facts.read(model, optimizers)
    extra = {"device": ["cpu"], "threads": [1, 3]}
    never = {"auto", "fp32"}  # never applied
    if able is not None:
        never.add(False)
    tried = [v for v in extra.get(optimization.name, values(optimization)) if v not in never]
    if not tried:
        pytest.skip("nothing to apply on a CPU")
    for value in tried:
        decision = Decision(optimization.name, value, "as asked", active=True)
        before = observed(target)
        expected = optimization.expected(decision, target, replace(facts, flags=before))
        with optimization.applied(decision, target):
            applied = observed(target)
        assert {k: v for k, v in (before | expected).items() if k in before} == applied, value
        assert observed(target) == before


@pytest.mark.parametrize(
    "optimization", [one for one in CATALOG if one.effect is Effect.EXACT], ids=lambda one: one.name
)
def test_exact_means_bit_equal_outputs(optimization):
    model, optimizers, value = here(optimization)
    if value is None:
        pytest.skip("nothing to do for it on a CPU")
    model.eval()
    x = torch.rand(2, 2, 5, 5)
    plain = model(x)
    config = SpeedConfig(**{optimization.name: value})
    with apply_speedups(model, config, optimizer=optimizers)[1] as context, context.autocast():
        assert torch.equal(model(x), plain)


@every
def test_every_optimization_says_where_it_helps_and_its_risk(optimization):
    for sentence in (optimization.helps, optimization.risk):
        assert len(sentence) > 10
        assert not sentence.endswith(".")
    theirs = "https://" if optimization.library else "https://docs.pytorch.org/"
    assert optimization.page.startswith(theirs)


def test_entries_of_extras_are_in_front_of_the_entries_that_they_name():
    names = [entry.name for entry in CATALOG]
    added = [entry for entry in CATALOG if entry.before]
    assert all(names.index(one.name) < names.index(one.before) for one in added)


# If torch lacks a function that an entry needs, the entry is declined, and the reason names it.


@pytest.mark.parametrize(
    ("entry", "asked", "owner", "name"),
    [
        ("sdpa", "math", torch.backends.cuda, "cudnn_sdp_enabled"),
        ("gemm", "onednn", torch._C._dynamo.eval_frame, "set_code_exec_strategy"),
    ],
)
def test_what_torch_moved_is_declined_and_the_rest_works(monkeypatch, entry, asked, owner, name):
    monkeypatch.delattr(owner, name)
    decision = plan(SpeedConfig(**{entry: asked}))[entry]
    assert (decision.declined, decision.active) == (True, False)
    assert name in decision.rule
    model = nn.Linear(4, 4)
    before = flags.snapshot()
    _, context = apply_speedups(model, SpeedConfig(**{entry: asked, "precision": "bf16"}))
    assert context.plan["precision"].active
    context.restore()
    assert flags.snapshot() == before


def test_an_own_mistake_is_not_taken_for_what_torch_has_moved(monkeypatch):
    from speedkit_jupyter.catalog.sdpa import Sdpa

    monkeypatch.setattr(Sdpa, "decide", lambda self, *_: self.no_such_thing)
    with pytest.raises(AttributeError, match="no_such_thing"):
        plan()

"""rewrites: modules made others in place, by request, and put back whatever happens."""

from __future__ import annotations

import copy
import io
import itertools
import pickle  # noqa: TID251
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn

from speedkit_jupyter import Facts, Hardware, SpeedConfig, apply_speedups, code, plan
from speedkit_jupyter.optimizations.base.decision import Effect
from speedkit_jupyter.optimizations.base.target import Target
from speedkit_jupyter.optimizations.rewrites import Rewrites
from speedkit_jupyter.optimizations.rewriting import in_place
from speedkit_jupyter.report.catalog_report import explain_report

KINDS = tuple(Rewrites.kinds)

ALL = {"instance_norm", "gelu", "inplace"}


class Block(nn.Module):
    """What each kind finds something in."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 16, 3), nn.InstanceNorm2d(16, affine=True))
        self.act = nn.GELU()
        self.mlp = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8), nn.SiLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.act(self.conv(x)).mean((2, 3)))


def block() -> nn.Module:
    torch.manual_seed(0)
    return Block()


def chosen(*kinds: str) -> SpeedConfig:
    """These kinds and no more."""
    wish = {"enabled": True} | {kind: kind in kinds for kind in KINDS}
    return SpeedConfig(rewrites=wish, alone=True)


def applied(model: nn.Module, *kinds: str, optimizer=None):
    return apply_speedups(model, chosen(*(kinds or KINDS)), optimizer=optimizer)[1]


def looks(model: nn.Module) -> list:
    """All that a rewrite may touch, by identity where there is one."""
    return [
        (id(part), type(part), id(part.__dict__), list(part.__dict__), getattr(part, "act", 0),
         getattr(part, "approximate", 0), part.training, getattr(part, "inplace", 0),
         [(name, id(p)) for name, p in part.named_parameters()],
         [id(hooks) for name, hooks in part.__dict__.items() if name.endswith("hooks")])
        for part in model.modules()
    ]  # fmt: skip


x = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


# --- what is decided ---


def test_rules_leave_it_and_say_that_it_has_to_be_asked_for():
    decision = plan(facts=Facts.read(block()))["rewrites"]
    assert (decision.active, decision.worth_measuring) == (False, None)
    assert "on request only" in decision.reason
    assert "1 GELU -> tanh" in decision.reason


@pytest.mark.parametrize(
    ("model", "wish", "words"),
    [
        (nn.Linear(2, 2), True, "no exact GELU"),
        (
            nn.Sequential(nn.GELU()),
            {"enabled": True, "gelu": False},
            "the model has nothing for instance_norm",
        ),
        (block(), {"enabled": True} | dict.fromkeys(KINDS, False), "no kind is chosen"),
        (torch.jit.script(nn.Sequential(nn.GELU())), True, "TorchScript"),
        (nn.GELU(approximate="tanh"), True, "no exact GELU"),
        (nn.InstanceNorm2d(12, affine=True), True, "multiple of 8"),
        (nn.InstanceNorm2d(16), True, "InstanceNorm2d with weights"),
        (nn.InstanceNorm2d(16, affine=True, track_running_stats=True), True, "InstanceNorm2d"),
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True)), True, "behind a layer"),
        (nn.Sequential(nn.Identity(), nn.ReLU()), True, "behind a layer"),
        (nn.Sequential(nn.Sigmoid(), nn.ReLU()), True, "behind a layer"),
    ],
)
def test_what_there_is_nothing_for_is_declined_with_the_reason(model, wish, words):
    decision = plan(SpeedConfig(rewrites=wish), facts=Facts.read(model))["rewrites"]
    assert decision.declined
    assert words in decision.reason


def test_it_changes_the_model_unless_all_is_in_place():
    for kinds in itertools.chain.from_iterable(itertools.combinations(KINDS, n) for n in (1, 2, 3)):
        found = plan(chosen(*kinds), facts=Facts.read(block()))
        assert bool(found.changes_model()) is (kinds != ("inplace",)), kinds
    only = nn.Sequential(nn.Linear(2, 2), nn.ReLU())  # nothing else to be found in it
    assert plan(chosen(*KINDS), facts=Facts.read(only)).changes_model() == {}


def test_on_a_cpu_it_is_said_that_tanh_has_been_slower():
    model = nn.Sequential(nn.GELU())
    facts = Facts.read(model)
    assert "the faster one" in plan(chosen("gelu"), facts=facts)["rewrites"].reason
    there = plan(chosen("gelu"), Hardware.from_json("t4"), facts.moved("cuda:0"))["rewrites"]
    assert there.active
    assert "the faster one" not in there.reason
    only = plan(chosen("inplace"), facts=Facts.read(block()))["rewrites"]
    assert "the faster one" not in only.reason


# --- what is applied ---


def test_each_module_is_named_in_the_report_and_before_and_after_are_told():
    model = block()
    context = applied(model)
    assert context.notes["rewrites"] == (
        "conv.1: InstanceNorm2d -> GroupNorm(8); act: GELU -> tanh; mlp.1: ReLU in place; "
        "mlp.3: SiLU in place"
    )
    changes = {change.name: (change.before, change.after) for change in context.changes()}
    assert changes["model.gelu"] == ("0 of 1 by tanh", "1 of 1 by tanh")
    assert changes["model.inplace"] == ("0 of 2 in place", "2 of 2 in place")
    context.restore()


def test_it_computes_what_plain_torch_computes_with_those_modules():
    model = block()
    by_hand = block()
    group = nn.GroupNorm(8, 16)
    group.weight, group.bias = by_hand.conv[1].weight, by_hand.conv[1].bias
    by_hand.conv[1], by_hand.act = group, nn.GELU(approximate="tanh")
    plain = model(x)
    with applied(model):
        assert torch.equal(model(x), by_hand(x))
    assert torch.equal(model(x), plain)


@pytest.mark.parametrize("ending", [None, ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("kinds", [KINDS, *((kind,) for kind in KINDS)])
def test_training_goes_on_with_the_same_parameters_and_all_comes_back(kinds, ending):
    model = block()
    handle = model.conv[1].register_forward_hook(lambda *_: None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before, keys = looks(model), list(model.state_dict())
    values = {name: value.clone() for name, value in model.named_parameters()}
    error = nullcontext() if ending is None else pytest.raises(ending)
    with error, applied(model, *kinds, optimizer=optimizer):
        assert list(model.state_dict()) == keys
        assert isinstance(model.conv[1], nn.GroupNorm) is ("instance_norm" in kinds)
        assert len(model.conv[1]._forward_hooks) == 1
        model(x).square().sum().backward()
        optimizer.step()
        if ending is not None:
            raise ending
    assert looks(model) == before
    moved = {name for name, value in model.named_parameters() if not value.equal(values[name])}
    assert moved == values.keys()
    handle.remove()
    assert not model.conv[1]._forward_hooks


def test_what_the_user_does_to_a_module_meanwhile_is_kept():
    model = block()
    with applied(model):
        model.eval()
        handle = model.conv[1].register_forward_hook(lambda *_: None)
        model.conv[1].weight = nn.Parameter(torch.zeros(16))
        model.act.approximate = "none"
    assert not model.conv[1].training
    assert type(model.conv[1]) is nn.InstanceNorm2d
    assert not model.conv[1].weight.any()
    assert model.act.approximate == "none"
    handle.remove()
    assert not model.conv[1]._forward_hooks


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_plans_on_a_model_a_part_and_a_twin_that_shares_it_come_back_in_any_order(order):
    model = block()
    twin = nn.Sequential(model.conv, model.act)
    before = looks(model), looks(twin)
    contexts = [applied(model), applied(model.conv, "instance_norm"), applied(twin)]
    for index in order[:2]:
        contexts[index].restore()
        left = [0, 1, 2]
        left = [one for one in left if not contexts[one].restored]
        assert isinstance(model.conv[1], nn.GroupNorm)  # each of them wants it
        assert (model.act.approximate == "tanh") is bool({0, 2}.intersection(left))
    contexts[order[2]].restore()
    assert (looks(model), looks(twin)) == before


def test_a_module_in_two_places_is_rewritten_once_and_comes_back_in_both():
    act, norm = nn.GELU(), nn.InstanceNorm2d(8, affine=True)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), norm, act, nn.Conv2d(8, 8, 1), norm, act)
    context = applied(model)
    assert context.notes["rewrites"].count("GroupNorm") == 1
    assert model[1] is model[4] is norm
    assert model[2] is act
    context.restore()
    assert type(norm) is nn.InstanceNorm2d
    assert act.approximate == "none"


def test_a_module_that_holds_the_model_it_lies_in_is_no_endless_loop():
    model = block()
    model.act.owner = model
    with applied(model) as context:
        assert context.notes["rewrites"].count("GELU") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_in_place_is_bit_equal_on_a_gpu_and_kinds_are_what_they_are_by_hand(dtype, layout):
    model = block().cuda().to(memory_format=layout)
    given = x.cuda().to(memory_format=layout).requires_grad_()

    def run():
        with torch.autocast("cuda", dtype, enabled=dtype is not torch.float32):
            result = model(given)
        return result.detach(), *torch.autograd.grad(result.float().sum(), model.parameters())

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        plain = run()
        with applied(model, "inplace"), written() as names:
            assert all(map(torch.equal, run(), plain))
            assert "ReLU" in names
        with applied(model):
            assert isinstance(model.conv[1], nn.GroupNorm)
            assert not torch.equal(run()[0], plain[0])
        assert all(map(torch.equal, run(), plain))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("copied", ["deepcopy", "pickle", "save", "slice", "replica"])
def test_copies_are_plain_torch(copied):
    model = block()
    with applied(model):
        if copied == "deepcopy":
            other = copy.deepcopy(model)
        elif copied == "pickle":
            other = pickle.loads(pickle.dumps(model))
        elif copied == "save":
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            other = torch.load(file, weights_only=False)
        elif copied == "slice":
            other = nn.ModuleList([model.mlp[:3], model.mlp + model.mlp])
        else:
            other = model.mlp._replicate_for_data_parallel()
    for part in other.modules():
        known = getattr(nn, type(part).__name__, Block)
        assert type(part) is known
    if copied in ("deepcopy", "pickle", "save"):
        assert list(other.state_dict()) == list(model.state_dict())


# --- in place, and only where it is safe ---


@contextmanager
def written() -> Iterator[list[str]]:
    """The operations that write over their input, meanwhile; by autograd's own version counter."""
    names: list[str] = []
    real = in_place.writing

    def watching(before, module, given):
        write = real(before, module, given)
        if write is not None:
            names.append(type(module).__name__)
        return write

    in_place.writing = watching
    try:
        yield names
    finally:
        in_place.writing = real


ACTIVATIONS = [
    nn.ReLU(), nn.ReLU6(), nn.Hardtanh(), nn.LeakyReLU(0.1), nn.LeakyReLU(-0.1), nn.SiLU(),
    nn.Hardswish(), nn.Mish(), nn.ELU(), nn.ELU(0.5),
]  # fmt: skip
LAYERS = {
    "Linear": (nn.Linear(8, 8), (4, 8)),
    "Conv1d": (nn.Conv1d(8, 8, 3), (2, 8, 9)),
    "Conv2d": (nn.Conv2d(8, 8, 3), (2, 8, 9, 9)),
    "Conv3d": (nn.Conv3d(8, 8, 3), (2, 8, 5, 5, 5)),
    "ConvTranspose1d": (nn.ConvTranspose1d(8, 8, 3), (2, 8, 9)),
    "ConvTranspose2d": (nn.ConvTranspose2d(8, 8, 3), (2, 8, 9, 9)),
    "ConvTranspose3d": (nn.ConvTranspose3d(8, 8, 3), (2, 8, 5, 5, 5)),
    "BatchNorm1d": (nn.BatchNorm1d(8), (4, 8)),
    "BatchNorm2d": (nn.BatchNorm2d(8), (2, 8, 9, 9)),
    "BatchNorm3d": (nn.BatchNorm3d(8), (2, 8, 5, 5, 5)),
    "GroupNorm": (nn.GroupNorm(2, 8), (2, 8, 9, 9)),
    "LayerNorm": (nn.LayerNorm(8), (2, 3, 8)),
}


def test_every_layer_that_may_stand_before_an_activation_is_tried_here():
    assert LAYERS.keys() == in_place.LAYERS
    known = in_place.by_result().keys() | in_place.by_input().keys()
    assert known == {type(one) for one in ACTIVATIONS}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("mode", ["train", "eval", "no_grad", "inference", "bf16", "bf16 no_grad"])
@pytest.mark.parametrize("name", LAYERS)
def test_results_and_gradients_are_bit_equal_behind_every_layer(name, mode):
    layer, shape = LAYERS[name]
    given = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for activation in ACTIVATIONS:
        model = nn.Sequential(layer, copy.deepcopy(activation), nn.Flatten())
        model.train(mode != "eval")
        around = {
            "no_grad": torch.no_grad(),
            "inference": torch.inference_mode(),
            "bf16": torch.autocast("cpu", torch.bfloat16),
        }

        def run(model=model, around=around):
            values = copy.deepcopy(layer.state_dict())
            model.zero_grad()
            leaf = given.clone().requires_grad_("no_grad" not in mode)
            with torch.no_grad() if mode == "bf16 no_grad" else nullcontext(), around.get(
                mode.partition(" ")[0], nullcontext()
            ):  # fmt: skip
                result = model(leaf)
            if result.requires_grad:
                result.float().square().sum().backward()
            layer.load_state_dict(values)
            gradients = [leaf.grad, *(p.grad for p in layer.parameters())]
            return [result.detach().clone(), *(g if g is None else g.clone() for g in gradients)]

        plain = run()
        with applied(model, "inplace"), written() as names:
            other = run()
        for one, two in zip(plain, other, strict=True):
            assert (one is None and two is None) or (
                torch.equal(one, two) and one.dtype == two.dtype
            )
        gradient_free = "no_grad" in mode or mode == "inference"
        is_free = gradient_free or type(activation) in in_place.by_result()
        assert bool(names) is is_free, (name, activation, mode)


class Loop(nn.Module):
    """Goes over the layers by itself, as perceptual losses do, and keeps what each gives."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for layer in self.layers:
            x = layer(x)
            kept.append(x)
        return torch.stack([one.mean() for one in kept])


class Sliced(Loop):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.layers[:1](x)
        return torch.stack([first.mean(), self.layers[1:](first).mean(), first.std()])


@pytest.mark.parametrize("kind", [Loop, Sliced])
def test_layers_that_a_model_runs_by_itself_keep_what_they_give(kind):
    model = kind()
    plain = model(x)
    with applied(model, "inplace"):
        assert torch.equal(model(x), plain)


def _kept_by(model: nn.Module, how: str) -> tuple[list, object]:
    kept: list[torch.Tensor] = []
    layer, activation = model[0], model[1]

    def hook(*given):
        kept.append(given[-1] if isinstance(given[-1], torch.Tensor) else given[-1][0])

    if how == "layer":
        return kept, layer.register_forward_hook(hook)
    if how == "activation's input":
        return kept, activation.register_forward_pre_hook(hook)
    if how == "activation":
        return kept, activation.register_forward_hook(lambda m, args, out: hook(args))
    if how == "every module":
        return kept, nn.modules.module.register_module_forward_hook(
            lambda m, args, out: hook(out) if m is layer else None
        )
    real = layer.forward
    layer.forward = lambda given: kept.append(real(given)) or kept[-1]
    return kept, None


@pytest.mark.parametrize("when", ["before", "meanwhile"])
@pytest.mark.parametrize(
    "how", ["layer", "activation's input", "activation", "every module", "forward of its own"]
)
def test_a_hook_sees_what_it_would_have_seen_also_one_that_comes_later(how, when):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    expected = model[0](x)
    assert (expected < 0).any()
    handle = None
    try:
        if when == "before":
            kept, handle = _kept_by(model, how)
        with applied(model, "inplace"):
            if when == "meanwhile":
                kept, handle = _kept_by(model, how)
            model(x)
    finally:
        if handle is not None:
            handle.remove()
    assert torch.equal(kept[0], expected)


class Mine(torch.Tensor):
    """A user's own kind of tensor."""


class Mode(torch.utils._python_dispatch.TorchDispatchMode):
    """Keeps what every operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.kept.append(func(*args, **(kwargs or {})))
        return self.kept[-1]


def test_tensors_of_other_kinds_views_and_modes_are_left_alone():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    with applied(model, "inplace"), written() as names:
        assert type(model(x.as_subclass(Mine))) is Mine
        with Mode() as mode:
            model(x)
        assert names == []
        assert any((one < 0).any() for one in mode.kept if isinstance(one, torch.Tensor))
        model(x)
        assert names == ["ReLU"]


@pytest.mark.parametrize(
    ("owner", "name"),
    [(torch._C, "_len_torch_dispatch_stack"), (nn.modules.module, "_has_any_global_hook")],
)
def test_where_torch_has_moved_what_it_stands_on_it_is_declined(owner, name, monkeypatch):
    monkeypatch.delattr(owner, name)
    decision = plan(chosen(*KINDS), facts=Facts.read(block()))["rewrites"]
    assert decision.declined
    assert name in decision.rule


@pytest.mark.filterwarnings("ignore:.*jit:DeprecationWarning")
@pytest.mark.parametrize("way", ["jit.script", "jit.trace", "fx"])
def test_torchs_own_tracers_take_it(way):
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.GELU())
    with applied(model):
        expected = model(x[0, 0, :, :3])
        made = {
            "jit.script": lambda: torch.jit.script(model),
            "jit.trace": lambda: torch.jit.trace(model, x[0, 0, :, :3]),
            "fx": lambda: torch.fx.symbolic_trace(model),
        }[way]()
        assert torch.allclose(made(x[0, 0, :, :3]), expected)


# --- what is told ---


@pytest.mark.parametrize("kinds", [KINDS, *((kind,) for kind in KINDS)])
def test_what_is_expected_is_what_is_so_once_it_is_applied(kinds):
    model = block()
    entry = next(one for one in optimizations() if one.name == "rewrites")
    decision = plan(chosen(*kinds), facts=Facts.read(model))["rewrites"]
    part = applied(model.conv, "instance_norm")  # a part's plan may have come first
    expected = entry.expected(decision, Target(model), Facts.read(model))
    with entry.applied(decision, Target(model)):
        assert entry.observe(Target(model)) == expected
    assert entry.observe(Target(model))["model.instance_norm"] == "1 of 1 as GroupNorm"
    part.restore()
    assert entry.observe(Target(model))["model.instance_norm"] == "0 of 1 as GroupNorm"


def test_a_saved_plan_asks_for_the_same_kinds_again(tmp_path):
    found = plan(chosen("gelu", "inplace"), facts=Facts.read(block()))
    found.to_yaml(tmp_path / "plan.yaml")
    again = plan(SpeedConfig.from_yaml(tmp_path / "plan.yaml"), facts=Facts.read(block()))
    assert again.changes_model() == found.changes_model()
    assert again["rewrites"].details == {"instance_norm": False, "gelu": True, "inplace": True}


def test_weights_saved_meanwhile_are_loaded_afterwards_and_the_other_way_round():
    model = block()
    before = copy.deepcopy(model.state_dict())
    with applied(model):
        model.load_state_dict(before)
        meanwhile = copy.deepcopy(model.state_dict())
    model.load_state_dict(meanwhile)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


# --- as plain code ---


@pytest.mark.parametrize("form", ["torch", "accelerate", "fabric", "transformers"])
def test_the_code_names_each_module(form):
    facts = Facts.read(block())
    text = code(plan(chosen(*KINDS), facts=facts), form)
    for words in ('"conv.1",', '"act",', '"mlp.3",', "torch.nn.GroupNorm(8", ".inplace = True"):
        assert words in text
    assert "speedkit_jupyter" not in text


def test_the_code_computes_the_same_and_its_parameters_are_the_models_own():
    model, other = block(), block()
    optimization = next(one for one in optimizations() if one.name == "rewrites")
    decision = plan(chosen(*KINDS), facts=Facts.read(other))["rewrites"]
    snippet = optimization.code(decision, Facts.read(other), "torch")
    parameters = dict(other.named_parameters())
    exec("\n".join([*snippet.imports, *snippet.model]), {"model": other, "torch": torch})
    assert {name: id(p) for name, p in other.named_parameters()} == {
        name: id(p) for name, p in parameters.items()
    }
    with applied(model):
        assert torch.equal(model(x), other(x))


def optimizations():
    from speedkit_jupyter.optimizations import CATALOG

    return CATALOG


def test_explain_says_what_it_does_to_the_numbers():
    (entry,) = [one for one in optimizations() if one.name == "rewrites"]
    text = repr(explain_report(entry, plan(facts=Facts.read(block()))["rewrites"], "model"))
    assert Effect.CHANGES_MODEL.value in text
    assert "on request only" in " ".join(text.split())


# --- compiled ---


def test_a_model_that_the_user_compiled_computes_by_tanh_meanwhile():
    model = nn.Sequential(nn.Linear(3, 8), nn.GELU())
    compiled = torch.compile(model, backend="eager")
    given = 3 * x[0, 0, :, :3]
    plain = compiled(given)
    with applied(model, "gelu"):
        assert torch.equal(compiled(given), nn.functional.gelu(model[0](given), approximate="tanh"))
    assert torch.equal(compiled(given), plain)
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [("inplace",), KINDS])
def test_beside_compile_it_computes_what_it_does_alone(kinds):
    model = block()
    with applied(model, *kinds):
        expected = model(x)
        gradient = torch.autograd.grad(expected.sum(), model.conv[0].weight)[0]
    config = SpeedConfig.from_dict(chosen(*kinds).to_dict() | {"compile": True})
    for _ in range(2):  # compiled anew where the plan comes back
        with apply_speedups(model, config)[1] as context:
            result = model(x)
            assert "compile" not in context.notes
            assert torch.allclose(result, expected, atol=1e-5)
            got = torch.autograd.grad(result.sum(), model.conv[0].weight)[0]
            assert torch.allclose(got, gradient, atol=1e-4)
    torch._dynamo.reset()


def test_a_model_that_was_compiled_in_the_sequence_itself_runs_as_before_and_after():
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU())
    compiled = torch.compile(model, backend="eager")
    given = x[0, 0, :, :3]
    plain = compiled(given)
    with applied(model, "inplace"):
        assert torch.equal(compiled(given), plain)
    assert torch.equal(compiled(given), plain)
    torch._dynamo.reset()


def test_a_model_lives_no_longer_for_it():
    import gc
    import weakref

    model = block()
    context = applied(model)
    gone = [weakref.ref(part) for part in model.modules()]
    del model, context
    gc.collect()
    assert not any(reference() for reference in gone)


def test_two_threads_that_train_the_model_meanwhile_get_the_same_numbers():
    from concurrent.futures import ThreadPoolExecutor

    model = block().eval()
    plain = model(x)

    def run(_: int) -> bool:
        return all(torch.equal(model(x), plain) for _ in range(20))

    with ThreadPoolExecutor(2) as pool:
        rest = pool.map(run, range(2))
        for _ in range(20):
            with applied(model, "inplace"):
                assert torch.equal(model(x), plain)
        assert all(rest)


@pytest.mark.parametrize("word", ["gelu", "instance_norm", "inplace"])
def test_the_name_of_a_kind_alone_asks_for_that_kind_only(word):
    asked = SpeedConfig.from_dict({"rewrites": word}).rewrites
    on = [name for name in ("gelu", "instance_norm", "inplace") if getattr(asked, name)]
    assert (asked.enabled, on) == (True, [word])

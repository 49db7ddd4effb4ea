"""Test `int8`, `int4` and `float8`, which make linear layers compute in low precision."""

import copy
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from training import everything

from speedkit_jupyter import Facts, Hardware, SpeedConfig, SpeedKitError, apply_speedups, code, plan
from speedkit_jupyter.catalog import named
from speedkit_jupyter.catalog.base.decision import Decision
from speedkit_jupyter.catalog.base.target import Target
from speedkit_jupyter.extras.by_request.quantization import INT8 as CONFIGS
from speedkit_jupyter.extras.by_request.quantization import OLDEST, SINCE, lacks, overflows

MISSING = lacks(Hardware.detect(), "torchao", SINCE)
real = pytest.mark.skipif(bool(MISSING), reason=MISSING)
MISSING_TOO = lacks(Hardware.detect(), "torchao", OLDEST)
real_of_any_version = pytest.mark.skipif(bool(MISSING_TOO), reason=MISSING_TOO)
INPUTS = torch.randn(5, 7, 64, generator=torch.Generator().manual_seed(0))


def network() -> nn.Module:
    """Return a network with two layers whose sizes suit float8, and one whose size does not."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32), nn.Linear(32, 3)).eval()


def on(name: str) -> Decision:
    return Decision(name, True, "as asked", active=True)


@torch.no_grad()
def with_plan(model, inputs, config, said=""):
    """Return results without and with the plan; assert that the undo restores the model."""
    before, plain = everything(model), model(inputs)
    files = {key: one.data_ptr() for key, one in model.state_dict().items()}
    for error in (None, ValueError, KeyboardInterrupt):
        context = apply_speedups(model, config.alone())[1]
        with suppress(ValueError, KeyboardInterrupt), context:
            assert said in str(context.changes())
            assert {key: one.data_ptr() for key, one in model.state_dict().items()} == files
            found = model(inputs)
            if error:
                raise error

        assert torch.equal(model(inputs), plain)
        assert everything(model) == before
    return plain, found


INT8 = SpeedConfig(int8=True).alone()
TOKENS = torch.arange(12).view(2, 6)


class Tied(nn.Module):
    """Model with a tied head, a layer used twice, and attention that reads a layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 32)
        self.shared = nn.Linear(32, 32)
        self.again = self.shared
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.head = nn.Linear(32, 40, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.again(self.shared(self.words(tokens))))
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return self.head(hidden)


def tied() -> Tied:
    torch.manual_seed(0)
    return Tied().eval()


@torch.no_grad()
def answer(model: nn.Module) -> torch.Tensor:
    return model(TOKENS)


OF_ANY = pytest.param("weights", marks=real_of_any_version)


@pytest.mark.parametrize("value", [pytest.param("dynamic", marks=real), OF_ANY])
def test_it_computes_what_torchao_does_and_everything_comes_back(value):
    from torchao import quantization

    model, expected = tied(), tied()
    seven_bits = value == "dynamic" and overflows()
    narrow = {"reduce_range": True} if seven_bits else {}
    make = getattr(quantization, CONFIGS[value])
    quantization.quantize_(expected, make(set_inductor_config=False, **narrow))
    plain, found = with_plan(model, TOKENS, SpeedConfig(int8=value), "2 of 2 linear layers")
    assert torch.equal(found, answer(expected))
    assert not torch.equal(found, plain)


@real
def test_a_tied_embedding_reads_the_users_own_weight():
    model = tied()
    with apply_speedups(model, INT8)[1]:
        assert type(model.words.weight) is nn.Parameter
        assert model.head.weight is not model.words.weight
    assert model.head.weight is model.words.weight


@real
def test_weights_that_were_trained_between_two_plans_are_rounded_anew():
    model = tied()
    with apply_speedups(model, INT8)[1]:
        first = answer(model)
    model.shared.weight.data.mul_(3)
    with apply_speedups(model, INT8)[1]:
        assert not torch.equal(answer(model), first)


@real
def test_layers_that_an_optimizer_steps_are_left_alone():
    model = tied()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)  # not passed to apply_speedups
    with apply_speedups(model, INT8)[1] as context:
        assert "no linear layer fits" in context.notes["int8"]
        before = model.head.weight.clone()
        model(TOKENS).sum().backward()
        optimizer.step()
        assert not torch.equal(model.head.weight, before)


@real
def test_an_optimizer_that_is_made_later_is_refused_in_one_line():
    model = tied()
    with apply_speedups(model, INT8)[1] as context:
        assert "no gradients go through" in context.plan["int8"].reason
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with pytest.raises(SpeedKitError, match="%speedkit restore"):
            optimizer.step()


@real
def test_layers_that_are_not_plain_are_left_and_counted():
    hooked = nn.Linear(4, 4)
    hooked.register_forward_hook(lambda *_: None)
    model = nn.Sequential(
        nn.Linear(4, 4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        nn.Linear(4, 4, dtype=torch.float64), nn.Linear(4, 4, device="meta"), nn.LazyLinear(4),
        hooked,
    )  # fmt: skip
    with apply_speedups(model, INT8)[1] as context:
        assert "1 of 6 linear layers" in str(context.changes())


@real
def test_what_was_made_is_kept_while_the_plan_is_hidden():
    model = tied()
    with apply_speedups(model, INT8)[1]:
        made = model.shared.weight
        with apply_speedups(model, SpeedConfig().alone())[1]:
            assert model.shared.weight is not made
        assert model.shared.weight is made


@real
@pytest.mark.slow
@pytest.mark.compile
def test_compiled_code_multiplies_by_it_too():
    torch._dynamo.reset()
    model = tied()
    plain = answer(model)
    with apply_speedups(model, SpeedConfig(int8=True, compile=True).alone())[1] as context:
        found = answer(model)
        assert "compile" not in context.notes
    assert not torch.allclose(found, plain, atol=1e-4)
    torch.testing.assert_close(found, plain, rtol=0.1, atol=0.1)


@real
def test_the_code_to_take_along_does_the_same(hardware):
    machine = hardware("cpu").model_copy(update={"libraries": {"torchao": "0.18.0"}})
    found = plan(INT8, machine, Facts(linears=4, parameters=9))

    model = tied()
    with apply_speedups(model, INT8)[1]:
        expected = answer(model)
    names: dict[str, Any] = {"model": copy.deepcopy(model)}
    exec(code(found), names)
    assert torch.equal(answer(names["model"]), expected)


@real
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("change", [
    lambda model: model.double(), lambda model: model.bfloat16(),
    lambda model: model.requires_grad_(False), lambda model: model.to("cpu"),
], ids=["double", "bfloat16", "frozen", "moved"])  # fmt: skip
def test_the_models_own_weights_come_back_after_a_cast_meanwhile(monkeypatch, change, swap):
    model = tied()
    before = [id(p) for p in model.parameters()]
    wanted = change(copy.deepcopy(model)).head.weight.dtype
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", swap)
    with apply_speedups(model, INT8)[1]:
        change(model)
    assert [id(p) for p in model.parameters()] == before
    assert {(type(p), p.dtype) for p in model.parameters()} == {(nn.Parameter, wanted)}


@real_of_any_version
def test_float8_trains_as_torchao_does_and_everything_comes_back(monkeypatch):
    import torchao.float8 as own

    config = own.Float8LinearConfig  # emulation needs no float8 units
    monkeypatch.setattr(own, "Float8LinearConfig", lambda **more: config(emulate=True, **more))
    model, expected = network().train(), network().train()
    optimizer, other = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, expected))
    modules, keys = [*model.modules()], list(model.state_dict())
    entry, target = named("float8"), Target(model, [optimizer])
    own.convert_to_float8_training(
        expected,
        config=own.Float8LinearConfig(pad_inner_dim=True),
        module_filter_fn=lambda m, _: type(m) is nn.Linear and m.out_features % 16 == 0,
    )
    with entry.applied(on("float8"), target):
        assert entry.observe(target) == {"model.float8": "2 of 3 linear layers"}
        assert list(model.state_dict()) == keys
        for one, its in ((model, optimizer), (expected, other)):
            one(INPUTS).pow(2).mean().backward()
            its.step()
        model.eval()
    assert [*model.modules()] == modules
    assert not any(module.training for module in modules)
    assert all(map(torch.equal, model.parameters(), expected.parameters()))
    assert any(p.grad is not None for p in model.parameters())


@real
def test_rows_that_are_no_whole_groups_multiply_as_before():
    model = nn.Sequential(nn.Linear(100, 64), nn.Linear(64, 2))
    entry = named("int4")
    with entry.applied(on("int4"), Target(model)):
        assert entry.observe(Target(model)) == {"model.int4": "0 of 2 linear layers"}
        assert {type(p) for p in model.parameters()} == {nn.Parameter}


@pytest.mark.gpu
@real
@pytest.mark.parametrize(("name", "capability"), [("float8", (8, 9)), ("int4", (8, 0))])
def test_on_a_gpu_it_is_near_the_model_and_comes_back(name, capability):
    if torch.cuda.get_device_capability() < capability:
        pytest.skip(f"needs compute capability {capability}")
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 64)).cuda().bfloat16()
    inputs = torch.randn(32, 256, device="cuda", dtype=torch.bfloat16)
    plain, found = with_plan(model, inputs, SpeedConfig(**{name: True}), "2 of 2 linear layers")
    assert not torch.equal(found, plain)
    assert (found - plain).norm() < 0.2 * plain.norm()

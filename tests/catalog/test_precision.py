"""Test `precision`: the model's own calls run under autocast and return float32."""

import copy
import dataclasses
import io

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from speedkit_jupyter import Hardware, SpeedConfig, apply_speedups, autocast_context, benchmark

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Net(nn.Module):
    """Model with a second method, `encode`, which notes the dtype of its product."""

    def __init__(self):
        super().__init__()
        self.body, self.head, self.seen = nn.Linear(8, 8), nn.Linear(8, 4), []

    def encode(self, x):
        y = self.body(x)
        self.seen.append((y.dtype, torch.is_autocast_enabled("cpu")))
        return y

    def forward(self, x):
        return self.head(self.encode(x))


@pytest.fixture(params=["bf16", "fp16"])
def applied(request):
    net = Net()
    config = SpeedConfig(precision=request.param, grad_scaler=False).alone()
    with apply_speedups(net, config)[1] as context:
        yield net, context, LOW[request.param]


X = torch.rand(3, 8)


def test_products_of_any_method_are_lowered_and_results_and_gradients_are_float32(applied):
    net, _, low = applied
    result = net(X)
    result.sum().backward()
    assert net.seen == [(low, True)]
    assert result.dtype is torch.float32
    assert {one.grad.dtype for one in net.parameters()} == {torch.float32}
    assert not torch.is_autocast_enabled("cpu")
    encoded = net.encode(X)  # another method
    assert encoded.dtype is torch.float32
    assert not torch.equal(encoded, nn.functional.linear(X, net.body.weight, net.body.bias))


def test_the_plans_own_block_and_another_autocast_stay_as_they_are(applied):
    net, context, low = applied
    for block in (context.autocast(), autocast_context(context)):
        with block:
            assert net(X).dtype is low
    with torch.autocast("cpu", torch.bfloat16):
        assert net(X).dtype is torch.bfloat16


def test_a_part_that_switches_autocast_off_inside_of_the_model_keeps_that(applied):
    net, _, _ = applied

    def forward(x):
        with torch.autocast("cpu", enabled=False):
            return net.head(x)

    seen = []
    net.head.register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    net.encode = forward
    net.head(X)
    net.forward = lambda x: forward(x)
    net(X)
    assert seen == [True, False]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_recomputes_as_it_computed(applied, reentrant):
    net, _, low = applied
    checkpoint(net, X.clone().requires_grad_(), use_reentrant=reentrant).sum().backward()
    assert {dtype for dtype, _ in net.seen} == {low}


def test_autocast_meets_no_nested_tensors_of_torchs_transformers(applied):
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    model, mask = nn.TransformerEncoder(layer, 1).eval(), torch.tensor([[False, True]])
    with apply_speedups(model, applied[1].config)[1], torch.no_grad():
        result = model(torch.rand(1, 2, 8), src_key_padding_mask=mask)
    assert (result.dtype, model.use_nested_tensor) == (torch.float32, True)


def test_results_keep_their_structure_and_other_objects_stay_themselves(applied):
    net, _, _ = applied

    @dataclasses.dataclass
    class Output:
        logits: torch.Tensor
        kept: list
        later: int = dataclasses.field(init=False)

    cache = Output(torch.ones(2), [])
    cache.itself = cache
    inner = net.head

    class Head(nn.Module):
        def forward(self, x):
            y = inner(x)
            policy = torch.distributions.Independent(torch.distributions.Normal(y, 1.0), 1)
            return {"a": (y, x.long()), "b": Output(y, [inner(x)]), "d": cache, "e": policy}

    net.head = Head()
    found = net(X)
    assert found["a"][0].dtype is torch.float32
    assert found["a"][1].dtype is torch.int64
    assert type(found["b"]) is Output
    assert found["b"].logits is found["e"].base_dist.loc is found["a"][0]
    assert found["b"].kept[0].dtype is torch.float32
    assert found["d"] is cache


def test_copies_and_files_are_of_the_plain_model(applied):
    net, _, _ = applied
    torch.save(net.state_dict(), io.BytesIO())
    twin = copy.deepcopy(net)
    twin(X)
    assert twin.seen[-1] == (torch.float32, False)
    assert [*net.state_dict()] == ["body.weight", "body.bias", "head.weight", "head.bias"]


@pytest.mark.parametrize(
    ("asked", "dtype"), [({"precision": "fp32"}, torch.float32), ({"threads": 1}, torch.bfloat16)]
)
def test_fp32_by_request_switches_an_outer_autocast_off_and_auto_does_not(machine, asked, dtype):
    machine("cpu")
    model, x = nn.Linear(4, 4), torch.rand(2, 4)
    _, ctx = apply_speedups(model, SpeedConfig(**asked))
    with ctx, torch.autocast("cpu"), ctx.autocast():
        assert model(x).dtype is dtype


@pytest.mark.parametrize("word", ["bf16", "fp16"])
def test_an_lstm_computes_on_every_cpu(word, here):
    if Hardware.current().cpu.bf16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("ONEDNN_MAX_CPU_ISA hides the CPU's bf16")
    model = nn.LSTM(4, 4)
    with apply_speedups(model, SpeedConfig(precision=word))[1] as context, context.autocast():
        output, _ = model(torch.rand(2, 3, 4))
        output.sum().backward()
    assert output.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


class Autocasts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.contexts = nn.Linear(8, 8), []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.contexts[0].autocast():
            return self.layer(x)


@pytest.mark.slow
def test_dynamo_follows_the_plan_that_is_in_force():
    model, x = Autocasts(), torch.randn(2, 8)
    compiled, plain = torch.compile(model, backend="eager"), model.layer(x)
    _, context = apply_speedups(model, SpeedConfig(precision="bf16").alone())
    model.contexts.append(context)
    try:
        assert not torch.equal(compiled(x), plain)
        context.restore()
        assert torch.equal(compiled(x), plain)

        def step() -> None:
            compiled(x).float().sum().backward()

        found = benchmark(step, "baseline,bf16", model=model, budget_s=0.5)
        baseline, lowered = (one.accuracy for one in found.records)
        assert (baseline.verdict, lowered.verdict) == ("exact", "rounding")
        assert lowered.output_error > 1e-4 > baseline.output_error
    finally:
        context.restore()
        torch._dynamo.reset()


class Adapted(nn.Module):
    """Model with a trained and a frozen layer. The frozen weight is large, so its cast is kept."""

    def __init__(self):
        super().__init__()
        self.base, self.adapter = nn.Linear(512, 1024).requires_grad_(False), nn.Linear(512, 1024)

    def forward(self, x):
        return self.base(x) + self.adapter(x)


@pytest.mark.parametrize("change", [
    lambda weight: None, torch.Tensor.zero_, lambda weight: weight.data.add_(1),
    lambda weight: setattr(weight, "data", torch.rand(1024, 512)),
    lambda weight: weight.requires_grad_(),
])  # fmt: skip
def test_a_frozen_weight_is_cast_once_and_computes_the_bits_of_autocast(change):
    net, x = Adapted(), torch.rand(4, 512, requires_grad=True)
    plain = copy.deepcopy(net)

    with apply_speedups(net, SpeedConfig(precision="bf16").alone())[1] as context:
        assert "1 frozen linear layer" in context.notes["precision"]
        for model in (net, plain):
            model(x)
            torch.manual_seed(1)
            with torch.no_grad():
                change(model.base.weight)
        ours = net(x)
        with torch.autocast("cpu", torch.bfloat16):
            theirs = plain(x).float()
        assert torch.equal(ours, theirs)
        assert torch.equal(*[torch.autograd.grad(one.sum(), x)[0] for one in (ours, theirs)])
        with CountingCasts() as casts:
            net(x)
        assert casts.sizes.count(1024 * 512) == (2 if net.base.weight.requires_grad else 1)


class CountingCasts(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is torch.ops.aten._to_copy.default:
            self.sizes.append(args[0].numel())
        return operator(*args, **(kwargs or {}))

    def __enter__(self):
        self.sizes = []
        return super().__enter__()

"""Test `activation_checkpointing`: less memory, bit-identical training, and a complete undo."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from speedkit_jupyter import Facts, SpeedConfig, apply_speedups, code, plan
from speedkit_jupyter.step import memory
from speedkit_jupyter.support.exceptions import SpeedKitError


class Attention(nn.Module):
    def __init__(self, width: int = 8, dropout: float = 0.2) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, mask=None):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.dropout(F.scaled_dot_product_attention(q, k, v, mask, 0.1 * self.training))
        return x + self.dropout(self.down(F.gelu(self.up(x))))


class Stack(nn.Module):
    def __init__(self, make=Attention, number: int = 4) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.blocks = nn.ModuleList([make() for _ in range(number)])

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = self.through(block, x)
        return self.last(x)

    def through(self, block, x):
        return block(x)


class Counting(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x, mask=None):
        self.seen += 1
        return super().forward(x, mask) * self.seen


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.two = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))

    def forward(self, x):
        return x + self.two(F.relu(self.norm(self.one(x).transpose(1, 2)).transpose(1, 2)))


class InPlace(Attention):
    def forward(self, x, mask=None):
        return super().forward(x.mul_(0.9), mask)


class Cached(Stack):
    """Model whose blocks append to a cache, as Hugging Face's decoders do."""

    class Cache:
        def __init__(self) -> None:
            self.layers: list[list[torch.Tensor]] = [[] for _ in range(4)]

    class Block(Attention):
        def forward(self, x, cache, number):
            cache.layers[number].append(x)
            return super().forward(torch.stack(cache.layers[number]).sum(0))

    def __init__(self) -> None:
        super().__init__(self.Block)

    def forward(self, x):
        x, cache = self.first(x), self.Cache()
        for number, block in enumerate(self.blocks):
            x = block(x, cache, number=number)
        assert [len(layer) for layer in cache.layers] == [1, 1, 1, 1]
        return self.last(x)


class Twice(Stack):
    def through(self, block, x):
        return block(block(x))


MODELS = {
    "dropout": Stack,
    "counters": lambda: Stack(Counting),
    "batch and spectral norm": lambda: Stack(Normed),
    "a cache": Cached,
    "a block twice": Twice,
    "torch's own": lambda: Stack(lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)),
}


def asked(on: bool = True) -> SpeedConfig:
    return SpeedConfig(activation_checkpointing=on).alone()


def trained(make, config: SpeedConfig, around=None) -> list:
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x, losses = torch.rand(3, 5, 4), []
    with apply_speedups(model, config, optimizer=optimizer)[1] as context:
        for _ in range(3):
            optimizer.zero_grad()
            with around() if around else context.autocast():
                loss = model(x).float().pow(2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        assert context.plan["activation_checkpointing"].active == (config != asked(False))
    gradients = [p.grad for p in model.parameters()]
    return [*losses, *gradients, *model.state_dict().values(), torch.get_rng_state()]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", MODELS)
def test_training_gives_the_same_bits_and_leaves_the_same_behind(name):
    assert all(map(torch.equal, *[trained(MODELS[name], asked(on)) for on in (False, True)]))


def test_the_same_bits_under_autocast_and_where_attention_is_chosen_around_the_forward_pass():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for around in (partial(torch.autocast, "cpu"), partial(sdpa_kernel, SDPBackend.MATH)):
        assert all(map(torch.equal, *[trained(Stack, asked(on), around) for on in (False, True)]))


@pytest.mark.gpu
def test_the_same_bits_on_a_gpu_where_dropout_draws_from_its_own_generator():
    found = []
    for on in (False, True):
        torch.manual_seed(0)
        model, x = Stack().cuda(), torch.rand(3, 5, 4).cuda()
        with apply_speedups(model, asked(on))[1]:
            model(x).pow(2).mean().backward()
        found.append([*(p.grad for p in model.parameters()), torch.cuda.get_rng_state()])
    assert all(map(torch.equal, *found))


def test_it_needs_less_memory():
    peaks = []
    for config in (asked(False), asked()):
        model, x = Stack(number=8), torch.rand(64, 32, 4)

        def step(model=model, x=x):
            model(x).pow(2).mean().backward()

        with apply_speedups(model, config)[1]:
            step()
            peaks.append(memory.needed(step, torch.device("cpu"), []).peak_bytes)
    plain, least = peaks
    assert least < 0.5 * plain


def test_hooks_of_the_users_are_called_once_a_step_as_ever():
    model, calls = Stack(), []
    with apply_speedups(model, asked())[1]:
        model.blocks[0].register_forward_hook(lambda *_: calls.append("block"))
        model.blocks[1].up.register_forward_pre_hook(lambda *_: calls.append("inside"))
        model.blocks[2].register_full_backward_hook(lambda *_: calls.append("backward"))
        model(torch.rand(3, 5, 4)).sum().backward()
    assert sorted(calls) == ["backward", "block", "inside"]


def test_where_nothing_is_kept_or_nothing_can_be_the_blocks_run_as_ever():
    model, x = Stack().eval(), torch.rand(3, 5, 4)
    with torch.no_grad():
        plain = model(x)
    weights = dict(model.named_parameters())

    def loss(weights):
        return torch.func.functional_call(model, weights, (x,)).sum()

    expected = torch.func.grad(loss)(weights)
    with apply_speedups(model, asked())[1]:
        with torch.no_grad():
            assert torch.equal(model(x), plain)
        with torch.inference_mode():
            assert torch.equal(model(x), plain)
        got = torch.func.grad(loss)(weights)
        assert all(torch.equal(got[name], expected[name]) for name in expected)
        assert torch.equal(torch.fx.symbolic_trace(model)(x), plain)


@pytest.mark.parametrize("form", ["torch", "transformers"])
def test_the_code_of_each_form_does_the_same(form):
    model, x = Stack(), torch.rand(3, 5, 4)
    text = code(plan(asked(), facts=Facts.read(model)), form, model=model)
    lines = text[text.index("from functools") :].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("for name in"))
    end = next(i for i, line in enumerate(lines) if "use_reentrant=False" in line)
    space = {"model": model}
    imports = ["from functools import partial", "from torch.utils.checkpoint import checkpoint"]
    assert set(imports) <= set(text.splitlines())
    exec("\n".join([*imports, *lines[start : end + 1]]), space)
    assert ["forward" in block.__dict__ for block in model.blocks] == [True] * 4
    model(x).sum().backward()


def test_a_hugging_face_model_is_told_in_its_own_words():
    facts = Facts(blocks=4, block_classes=("Block",), own_checkpointing="off")
    decided = plan(asked(), facts=facts)
    assert 'model.gradient_checkpointing_enable({"use_reentrant": False})' in code(decided)
    assert "gradient_checkpointing=True" in code(decided, "transformers")


def test_repeated_blocks_that_the_user_compiled_are_left_alone():
    model = Stack()
    model.blocks[0].compile(backend="eager")
    own = model.blocks[0]._compiled_call_impl
    with apply_speedups(model, asked())[1] as context:
        assert model.blocks[0]._compiled_call_impl is own
        assert context.changes()[-1].after == "3 of 4 blocks"
    assert model.blocks[0].__dict__.pop("_compiled_call_impl") is own


def test_a_block_that_writes_to_its_input_is_refused_in_one_line():
    model = Stack(InPlace)
    with (
        apply_speedups(model, asked())[1],
        pytest.raises(SpeedKitError, match="a InPlace writes to its inputs"),
    ):
        model(torch.rand(3, 5, 4))


def test_a_note_says_that_blocks_with_a_cache_are_not_called_again():
    model = Cached()
    with apply_speedups(model, asked())[1] as context:
        model(torch.rand(3, 5, 4)).sum().backward()
        assert "use_cache=False" in context.notes["activation_checkpointing"]


@pytest.mark.parametrize("change", [
    lambda model, optimizer: optimizer.step(),
    lambda model, optimizer: model.blocks[0].up.weight.data.mul_(0.5),
    lambda model, optimizer: model.eval(),
    lambda model, optimizer: model.blocks[0].requires_grad_(False),
], ids=["step", "data", "mode", "frozen"])  # fmt: skip
def test_what_was_changed_before_the_backward_pass_is_refused_in_one_line(change):
    model, x = Stack(), torch.rand(3, 5, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    with apply_speedups(model, asked())[1]:
        loss = model(x).sum()
        model(x).sum().backward()
        change(model, optimizer)
        with pytest.raises(SpeedKitError, match=r"run backward\(\) before"):
            loss.backward()

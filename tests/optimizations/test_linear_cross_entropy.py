"""linear_cross_entropy: the same loss and gradients, logits only where somebody asks for them."""

from __future__ import annotations

import copy
import io
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from speedkit_jupyter import Facts, SpeedConfig, apply_speedups, benchmark, code, plan
from speedkit_jupyter.measure.checks import memory
from speedkit_jupyter.optimizations import named
from speedkit_jupyter.optimizations.facts.head import Head, head
from speedkit_jupyter.optimizations.heads.head_calls import HeadCalls
from speedkit_jupyter.optimizations.heads.logits import kind
from speedkit_jupyter.optimizations.properties.calls import layer_of
from speedkit_jupyter.plans.applying import prepare
from speedkit_jupyter.support.exceptions import SpeedKitError

ENTRY = named("linear_cross_entropy")
WORDS = 1200
pytestmark = pytest.mark.skipif(
    not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="needs torch 2.13"
)


class Language(nn.Module):
    def __init__(self, bias: bool = True, tied: bool = False) -> None:
        super().__init__()
        self.table, self.up = nn.Embedding(WORDS, 16), nn.Linear(16, 16)
        self.lm_head = nn.Linear(16, WORDS, bias=bias)
        if tied:
            self.lm_head.weight = self.table.weight

    def forward(self, ids):
        return self.lm_head(torch.tanh(self.up(self.table(ids))))


def asked(on: bool = True, chunks: int = 3) -> SpeedConfig:
    return SpeedConfig(linear_cross_entropy={"enabled": on, "chunks": chunks}).alone()


def seeded(make=Language):
    torch.manual_seed(0)
    return make()


def batch():
    torch.manual_seed(1)
    ids = torch.randint(0, WORDS, (5, 7))
    targets = torch.randint(0, WORDS, (5, 7))
    targets[0, :3] = -100
    return ids, targets


def flat(model, ids, targets, **more):
    return F.cross_entropy(model(ids).view(-1, WORDS), targets.view(-1), **more)


def shifted(model, ids, targets):
    logits = model(ids)
    logits = logits[..., :-1, :].contiguous().float()
    return nn.CrossEntropyLoss()(logits.view(-1, logits.size(-1)), targets[..., 1:].reshape(-1))


def chosen(model, ids, targets):
    mask = targets != -100
    return F.cross_entropy(model(ids)[mask], targets[mask], reduction="sum")


FUSED = {
    "flattened": flat,
    "flatten(0, 1)": lambda m, x, y: F.cross_entropy(m(x).flatten(0, 1), y.flatten()),
    "reshaped by minus one": lambda m, x, y: F.cross_entropy(
        m(x).reshape(x.numel(), -1), y.reshape(-1)),
    "shifted as language models are": shifted,
    "classes second": lambda m, x, y: F.cross_entropy(m(x).transpose(1, 2), y),
    "classes second by permute": lambda m, x, y: F.cross_entropy(m(x).permute(0, 2, 1), y),
    "chosen by a mask": chosen,
    "one position": lambda m, x, y: F.cross_entropy(m(x)[:, -1], y[:, -1]),
    "a sum": lambda m, x, y: flat(m, x, y, reduction="sum"),
    "each for itself": lambda m, x, y: flat(m, x, y, reduction="none").pow(2).sum(),
    "another ignored index": lambda m, x, y: flat(m, x, y.clamp(min=5), ignore_index=5),
    "weighed classes": lambda m, x, y: flat(m, x, y, weight=torch.linspace(0.1, 1, WORDS)),
    "by keyword": lambda m, x, y: F.cross_entropy(
        input=m(x).view(-1, WORDS), target=y.view(-1)),
    "two losses": lambda m, x, y: flat(m, x, y) + 0.5 * flat(m, x.flip(0), y.flip(0)),
    "in another dtype": lambda m, x, y: F.cross_entropy(
        m(x).to(torch.float32).view(-1, WORDS), y.view(-1)),
}  # fmt: skip
PLAIN = {
    "smoothed labels": (lambda m, x, y: flat(m, x, y, label_smoothing=0.1), "smoothed"),
    "probabilities": (
        lambda m, x, y: F.cross_entropy(
            m(x).view(-1, WORDS), torch.full((x.numel(), WORDS), 1 / WORDS)), "indices"),
    "another loss": (lambda m, x, y: m(x).logsumexp(-1).mean(), ""),
    "log softmax": (
        lambda m, x, y: F.nll_loss(m(x).log_softmax(-1).view(-1, WORDS), y.view(-1)), ""),
    "arithmetic before": (
        lambda m, x, y: F.cross_entropy(m(x).view(-1, WORDS) / 0.7, y.view(-1)), ""),
    "every other class": (
        lambda m, x, y: F.cross_entropy(m(x)[..., ::2].flatten(0, 1), y.flatten() // 2 % 600
                                        * (y.flatten() >= 0)), ""),
    "written to": (lambda m, x, y: F.cross_entropy(
        m(x).view(-1, WORDS).mul_(2), y.view(-1)), ""),
    "a gradient of the logits": (lambda m, x, y: watched(m, x, y), ""),
    "below python": (lambda m, x, y: Double.apply(m(x)).pow(2).mean(), ""),
}  # fmt: skip


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


def watched(model, ids, targets):
    logits = model(ids)
    logits.retain_grad()
    model.kept = logits
    return F.cross_entropy(logits.view(-1, WORDS), targets.view(-1))


def trained(config, loss, make=Language, around=None):
    """Loss and gradients, and what became of the losses."""
    model = seeded(make)
    with apply_speedups(model, config)[1] as context:
        with around() if around else context.autocast():
            value = loss(model, *batch())
        value.backward()
        layer = layer_of(model.lm_head, HeadCalls)
    gradients = [p.grad for p in model.parameters()]
    return value.detach(), gradients, None if layer is None else layer.counts


def assert_same(one, other):
    torch.testing.assert_close(one[0], other[0])
    for a, b in zip(one[1], other[1], strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", FUSED)
def test_the_loss_is_computed_in_parts_with_the_same_gradients(name):
    found = trained(asked(), FUSED[name])
    assert_same(found, trained(asked(False), FUSED[name]))
    losses = 2 if name == "two losses" else 1
    assert str(found[2]) == f"{losses} losses of {losses} calls"


@pytest.mark.parametrize("name", PLAIN)
def test_whatever_else_is_done_with_logits_gives_what_it_gave_and_says_why(name):
    loss, why = PLAIN[name]
    found = trained(asked(), loss)
    assert_same(found, trained(asked(False), loss))
    assert found[2].fused == 0
    assert why in found[2].note


@pytest.mark.parametrize("make", [lambda: Language(bias=False), lambda: Language(tied=True)])
def test_without_a_bias_and_with_tied_weights(make):
    assert_same(trained(asked(), flat, make), trained(asked(False), flat, make))


def test_the_gradient_of_the_logits_is_there_where_it_was_asked_for():
    model = seeded()
    with apply_speedups(model, asked())[1]:
        watched(model, *batch()).backward()
        assert model.kept.grad.shape == (5, 7, WORDS)


def test_logits_can_be_looked_at_printed_copied_and_saved_after_their_loss():
    model, (ids, targets) = seeded(), batch()
    expected = model(ids)
    with apply_speedups(model, asked())[1]:
        logits = model(ids)
        loss = F.cross_entropy(logits.view(-1, WORDS), targets.view(-1))
        assert isinstance(logits, kind())
        assert logits.computed is None
        assert (logits.shape, logits.dtype, logits.ndim) == (expected.shape, torch.float32, 3)
        assert (len(logits), logits.size(-1), logits.requires_grad) == (5, WORDS, True)
        assert logits.computed is None
    loss.backward()
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    torch.testing.assert_close(logits.detach().numpy(), expected.detach().numpy())
    assert "tensor(" in repr(logits)
    file = io.BytesIO()
    torch.save({"logits": logits.detach(), "whole": logits}, file)
    file.seek(0)
    saved = torch.load(file)
    assert type(saved["whole"]) is torch.Tensor
    torch.testing.assert_close(saved["whole"], expected)
    torch.testing.assert_close(copy.deepcopy(logits.detach()), expected.detach())
    torch.testing.assert_close(torch.stack([logits, logits])[0], expected)
    assert float(logits[0, 0, 0]) == pytest.approx(float(expected[0, 0, 0]), rel=1e-5)


def test_metrics_under_no_grad_do_not_cut_the_graph_of_a_loss_that_follows():
    def loss(model, ids, targets):
        logits = model(ids)
        with torch.no_grad():
            logits.argmax(-1).sum()
        return flat(lambda _: logits, ids, targets) + logits.pow(2).mean()

    assert_same(trained(asked(), loss), trained(asked(False), loss))


def test_under_autocast_within_the_rounding_of_bf16_and_the_loss_itself_is_not_rounded():
    def around():
        return torch.autocast("cpu", dtype=torch.bfloat16)

    plain, exact = trained(asked(False), flat, around=around), trained(asked(False), flat)
    found = trained(asked(), flat, around=around)
    assert found[2].fused == 1
    assert abs(found[0] - exact[0]) <= abs(plain[0] - exact[0]) + 1e-3
    for a, b in zip(found[1], exact[1], strict=True):
        assert (a - b).norm() < 0.03 * b.norm()


def test_it_needs_less_memory():
    peaks = []
    for on in (False, True):
        model, ids = seeded(), torch.randint(0, WORDS, (64, 16))

        def step(model=model, ids=ids):
            flat(model, ids, ids).backward()

        with apply_speedups(model, asked(on, chunks=8))[1]:
            step()
            peaks.append(memory.needed(step, torch.device("cpu"), []).peak_bytes)
    assert peaks[1] < 0.5 * peaks[0]


@pytest.mark.parametrize("weighed", [False, True], ids=["plain", "weighed"])
def test_a_mean_over_no_target_is_no_number_as_torch_has_it(weighed):
    model, (ids, targets) = seeded(), batch()
    weight = torch.ones(WORDS) if weighed else None
    with apply_speedups(model, asked())[1]:
        loss = flat(model, ids, torch.full_like(targets, -100), weight=weight)
        loss.backward()
    assert loss.isnan()
    assert not model.lm_head.weight.grad.any()


def test_in_half_precision_without_autocast_the_loss_is_of_that_dtype():
    model, (ids, targets) = seeded().bfloat16(), batch()
    expected = flat(model, ids, targets)
    with apply_speedups(model, asked())[1]:
        loss = flat(model, ids, targets)
    assert loss.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(loss, expected)


def test_logits_that_are_asked_for_after_the_optimizer_has_moved_the_weights_say_so():
    model, (ids, targets) = seeded(), batch()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with apply_speedups(model, asked())[1]:
        logits = model(ids)
        F.cross_entropy(logits.view(-1, WORDS), targets.view(-1)).backward()
        optimizer.step()
        with pytest.raises(SpeedKitError, match="before optimizer"):
            logits.argmax(-1)


def test_what_is_written_to_a_view_is_seen_in_the_logits():
    model, (ids, _) = seeded(), batch()
    expected = model(ids).detach().clone()
    expected[:, -1] = 0
    with apply_speedups(model, asked())[1]:
        logits = model(ids)
        with torch.no_grad():
            logits[:, -1].zero_()
    torch.testing.assert_close(logits.detach().clone(), expected)


def test_a_parametrized_layer_is_called_as_ever():
    model, (ids, targets) = seeded(), batch()
    nn.utils.parametrizations.weight_norm(model.lm_head)
    expected = flat(model, ids, targets)
    with apply_speedups(model, asked())[1]:
        assert flat(model, ids, targets) == expected


def test_values_that_are_read_below_python_first_keep_the_graph_of_a_loss_that_follows():
    model, (ids, targets) = seeded(), batch()
    with apply_speedups(model, asked())[1]:
        view = model(ids).view(-1, WORDS)
        torch.utils.dlpack.to_dlpack(view.detach())
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            view.exp()
        F.cross_entropy(view, targets.view(-1)).backward()
    found = model.lm_head.weight.grad.clone()
    model.zero_grad()
    flat(model, ids, targets).backward()
    torch.testing.assert_close(found, model.lm_head.weight.grad)


def test_without_gradients_hooks_and_under_torch_func_calls_are_as_ever():
    model, (ids, targets) = seeded(), batch()
    with torch.no_grad():
        expected = model(ids)
    seen = []
    with apply_speedups(model, asked())[1]:
        with torch.no_grad():
            assert torch.equal(model(ids), expected)
        with torch.inference_mode():
            assert type(model(ids)) is torch.Tensor
        weights = dict(model.named_parameters())
        torch.func.grad(lambda w: flat(lambda x: torch.func.functional_call(model, w, (x,)),
                                       ids, targets))(weights)  # fmt: skip
        handle = model.lm_head.register_forward_hook(lambda *given: seen.append(given[2].shape))
        assert type(model(ids)) is torch.Tensor
        handle.remove()
        assert type(model(ids)) is kind()
    assert seen == [(5, 7, WORDS)]
    assert type(model(ids)) is torch.Tensor


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_losses_that_models_of_transformers_compute_themselves(name):
    transformers = pytest.importorskip("transformers")
    size = dict(  # noqa: C408
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        vocab_size=WORDS, max_position_embeddings=16,
    )  # fmt: skip
    if name == "bert":
        make, config = transformers.BertForMaskedLM, transformers.BertConfig(**size)
    elif name == "gpt2":
        make = transformers.GPT2LMHeadModel
        config = transformers.GPT2Config(vocab_size=WORDS, n_embd=16, n_layer=1, n_head=2,
                                         n_positions=16)  # fmt: skip
    else:
        make, config = transformers.LlamaForCausalLM, transformers.LlamaConfig(**size)
    ids, targets = batch()
    found = []
    for on in (False, True):
        torch.manual_seed(0)
        model = make(config).eval()
        with apply_speedups(model, asked(on))[1] as context:
            loss = model(input_ids=ids, labels=targets).loss
            loss.backward()
            if on:
                assert "1 losses of 1 calls" in str(context.changes())
        found.append((loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]))
    assert_same(*found)


def test_nothing_is_left_of_it():
    model = seeded()
    before = [sorted(part.__dict__) for part in model.modules()]

    def interrupted() -> None:
        with apply_speedups(model, asked())[1]:
            flat(model, *batch()).backward()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [sorted(part.__dict__) for part in model.modules()] == before
    twin = copy.deepcopy(model)
    assert type(twin(batch()[0])) is torch.Tensor


def test_a_measured_plan_acts_in_its_own_thread_alone():
    model, kinds = seeded(), []
    context = prepare(model, asked())
    with context.in_force():
        thread = threading.Thread(target=lambda: kinds.append(type(model(batch()[0]))))
        thread.start()
        thread.join()
        kinds.append(type(model(batch()[0])))
    assert kinds == [torch.Tensor, kind()]


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (Language, Head("lm_head", 16, WORDS)),
        (lambda: nn.Sequential(nn.Linear(16, 4096), nn.Linear(4096, 10)), Head("0", 16, 4096)),
        (lambda: nn.Sequential(nn.Linear(2048, 1000)), None),
        (lambda: nn.Linear(8, 5000), None),
        (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 2, 1024), 3), None),
    ],
)
def test_the_last_layer_is_found(make, found):
    assert head(make()) == found


def test_auto_never_takes_it():
    decision = plan(SpeedConfig(), facts=Facts.read(seeded()))["linear_cross_entropy"]
    assert (decision.active, decision.declined) == (False, False)
    assert "request" in decision.reason


@pytest.mark.parametrize(
    ("torch_version", "facts", "words"),
    [
        ("2.13.0", Facts(), "1000 classes"),
        ("2.12.1", Facts(head=Head("lm_head", 16, WORDS)), "torch 2.13"),
        ("2.13.0", Facts(head=Head("lm_head", 16, WORDS), compiled="in place"), "compiled"),
    ],
)
def test_it_is_declined_with_the_reason(hardware, torch_version, facts, words):
    machine = hardware("cpu").model_copy(update={"torch": torch_version})
    decision = plan(asked(), machine, facts)["linear_cross_entropy"]
    assert (decision.active, decision.declined) == (False, True)
    assert words in decision.reason


def test_only_a_search_for_memory_tries_it(hardware):
    from speedkit_jupyter.tuning.candidates import candidates

    facts = Facts(head=Head("lm_head", 16, WORDS))
    both = [candidates(hardware("cpu"), facts, objective=aim) for aim in ("time", "memory")]
    names = [[one.name for one in found if ENTRY.name in one.values] for found in both]
    assert names == [[], ["linear_cross_entropy"]]


@pytest.mark.parametrize("form", ["torch", "accelerate", "fabric"])
def test_the_code_taken_home_does_the_same(form):
    model, (ids, targets) = seeded(), batch()
    expected = flat(model, ids, targets)
    lines = code(plan(asked(), facts=Facts.read(model)), form, model=model).splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("head ="))
    end = next(at for at in range(start, len(lines)) if lines[at] == "    )" and at > start + 9)
    imports = [line for line in lines if line.startswith("from torch.nn")]
    space = {"model": model}
    exec("\n".join([*imports, *lines[start : end + 1]]), space)
    torch.testing.assert_close(space["cross_entropy"](model(ids), targets), expected)


def test_trainer_is_told_its_own_way():
    with pytest.raises(Exception, match="use_liger_kernel"):
        code(plan(asked(), facts=Facts.read(seeded())), "transformers")


def test_a_comparison_shows_less_memory_the_same_numbers_and_how_losses_were_computed():
    model, ids = seeded(), torch.randint(0, WORDS, (32, 16))
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        optimizer.zero_grad()
        loss = flat(model, ids, ids)
        loss.backward()
        optimizer.step()
        return loss

    found = benchmark(
        step, "baseline,linear_cross_entropy", model=model, optimizer=optimizer, budget_s=20
    )
    record = found.records[1]
    assert record.accuracy.verdict in ("exact", "rounding")
    assert record.memory.peak_bytes < 0.7 * found.baseline.memory.peak_bytes
    assert "losses of" in str(found)


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("wrong", [WORDS, -1])
def test_a_target_that_is_no_class_is_said_as_cross_entropy_says_it(wrong, weighed):
    model, (ids, targets) = seeded(), batch()
    targets[2, 2] = wrong
    more = {"weight": torch.ones(WORDS)} if weighed else {}
    with pytest.raises(IndexError) as plain:
        flat(model, ids, targets, **more)
    with apply_speedups(model, asked())[1], pytest.raises(IndexError) as found:
        flat(model, ids, targets, **more)
    assert str(found.value) == str(plain.value)


def test_second_derivatives_are_refused_in_one_line():
    model, (ids, targets) = seeded(), batch()
    with apply_speedups(model, asked())[1]:
        loss = flat(model, ids, targets)
        with pytest.raises(SpeedKitError, match="second derivative"):
            torch.autograd.grad(loss, model.lm_head.weight, create_graph=True)


@pytest.mark.parametrize("hooked", ["lm_head.weight", "lm_head.bias", "up.weight"])
def test_hooks_of_tensors_run_once_where_logits_go_below_python(hooked):
    found = []
    for on in (False, True):
        model, (ids, targets), calls = seeded(), batch(), []
        model.get_parameter(hooked).register_hook(lambda g, c=calls: (c.append(1), 2 * g)[1])
        with apply_speedups(model, asked(on))[1]:
            logits = Double.apply(model(ids))
            F.cross_entropy(logits.view(-1, WORDS), targets.view(-1)).backward()
        found.append((calls, [p.grad for p in model.parameters()]))
    assert found[0][0] == found[1][0] == [1]
    torch.testing.assert_close(found[1][1], found[0][1])


@pytest.mark.parametrize("how", ["data", "no_grad", "features"])
def test_a_loss_of_what_has_changed_since_says_so(how):
    model, (ids, targets) = seeded(), batch()
    with apply_speedups(model, asked())[1]:
        logits = model(ids)
        if how == "data":
            model.lm_head.weight.data.mul_(3)
        elif how == "features":
            logits.source.features.detach().mul_(3)
        else:
            with torch.no_grad():
                model.lm_head.weight.mul_(3)
        with pytest.raises(SpeedKitError, match="had changed"):
            F.cross_entropy(logits.view(-1, WORDS), targets.view(-1))


def test_a_view_is_what_its_mask_said_when_it_was_made():
    model, (ids, _) = seeded(), batch()
    mask = torch.ones(ids.shape, dtype=torch.bool)
    with apply_speedups(model, asked())[1]:
        view = model(ids)[mask]
        mask[0] = False
        assert len(view.argmax(-1)) == len(view) == ids.numel()

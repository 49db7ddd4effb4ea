"""Check plans for transformers' generate(): same tokens, exact undo, times and refusals."""

from inspect import signature
from types import SimpleNamespace

import pytest
import torch
from training import llama

from speedkit_jupyter import Facts, SpeedConfig, apply_speedups, benchmark, plan
from speedkit_jupyter.extras.generation.static_cache import rows_and_length
from speedkit_jupyter.search.candidates import candidates

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.usefixtures("made_time"), pytest.mark.filterwarnings("ignore")]

PROMPT = torch.arange(24).reshape(2, 12)
compiles = pytest.mark.slow


def tokens(model, **given):
    torch.manual_seed(1)
    return model.generate(PROMPT, **{"max_new_tokens": 8, "do_sample": False} | given)


def look(model):
    names = {name: id(value) for name, value in model.named_parameters()}
    return sorted(vars(model)), names, model.generation_config.to_dict(), model.dtype


@pytest.mark.parametrize(
    "wishes", [{"inference": True}, pytest.param({"static_cache": True}, marks=compiles)],
    ids="+".join,
)  # fmt: skip
def test_plans_write_the_same_tokens_and_leave_nothing(wishes):
    model = llama()
    before, greedy = look(model), tokens(model)
    sampled, beams = tokens(model, do_sample=True), tokens(model, num_beams=2)
    given = signature(model.generate)
    _, context = apply_speedups(model, SpeedConfig(**wishes).alone())
    assert tokens(model).equal(greedy)
    assert signature(model.generate) == given  # libraries read it
    config = transformers.GenerationConfig(max_new_tokens=8, do_sample=False)
    assert tokens(model, generation_config=config).equal(greedy)
    assert config.cache_implementation is None
    if wishes == {"static_cache": True}:  # `inference` rounds, which may change sampled tokens
        assert tokens(model, do_sample=True).equal(sampled)
        assert tokens(model, num_beams=2).equal(beams)
    assert model(PROMPT).logits.dtype is torch.float32
    assert model.generation_config.to_dict() == before[2]
    if "static_cache" in wishes:
        assert "2 × 32" in context.notes["static_cache"]
        assert tokens(model, max_new_tokens=30).shape == (2, 42)
        assert "2 × 32, 2 × 64; torch compiles" in context.notes["static_cache"]
    context.restore()
    assert look(model) == before
    assert tokens(model).equal(greedy)


def test_autocast_and_inference_work_with_the_users_own_static_cache():
    model, second, update = llama(), llama(), transformers.Cache.update
    want = tokens(model)
    first = apply_speedups(model, SpeedConfig(precision="bf16").alone())[1]
    other = apply_speedups(second, SpeedConfig(precision="bf16").alone())[1]
    first.restore()
    assert transformers.Cache.update is not update
    other.restore()
    assert transformers.Cache.update is update
    for wish in ({"precision": "bf16"}, {"inference": True}):
        with apply_speedups(model, SpeedConfig(**wish).alone())[1]:
            assert tokens(model, cache_implementation="static").equal(want)
    assert tokens(model, cache_implementation="static").equal(want)


def test_a_text_beyond_the_positions_of_the_model_is_generated_as_before():
    model = llama()
    wanted = tokens(model, max_new_tokens=60)
    _, context = apply_speedups(model, SpeedConfig(static_cache=True).alone())
    assert tokens(model, max_new_tokens=60).equal(wanted)
    assert "need 72 positions, and the model has 64" in context.notes["static_cache"]
    context.restore()


class WithGenerate(transformers.GenerationMixin):
    _can_compile_fullgraph = True


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({}, "no part of the model has the generate() of transformers"),
        ({"classes": {WithGenerate: 1}}, "training mode"),
        ({"classes": {WithGenerate: 1}, "training": False, "compiled": "in place"}, "compiled"),
    ],
)
def test_a_static_cache_is_declined_with_a_reason(facts, reason, hardware):
    found = plan(SpeedConfig(static_cache=True), hardware("cpu"), Facts(**facts))["static_cache"]
    assert found.declined
    assert reason in found.reason


def test_autocast_excludes_a_static_cache(hardware):
    facts = Facts(classes={WithGenerate: 1}, training=False)
    wishes = SpeedConfig(precision="bf16", static_cache=True)
    assert plan(wishes, hardware("cpu_avx512_bf16"), facts)["static_cache"].declined


CONFIG = SimpleNamespace(max_length=20, max_new_tokens=None, num_beams=1)
MODEL = SimpleNamespace(
    generation_config=CONFIG,
    config=SimpleNamespace(is_encoder_decoder=False),
    training=False,
    device=torch.device("cpu"),
)


@pytest.mark.parametrize(
    ("args", "given", "expected"),
    [
        ((PROMPT,), {}, (2, 20)),
        ((), {"input_ids": PROMPT, "max_new_tokens": 5, "num_return_sequences": 3}, (6, 17)),
        ((PROMPT,), {"use_cache": False}, None),
        ((PROMPT,), {"num_beams": 4}, None),
        ((PROMPT,), {"past_key_values": object()}, None),
        ((PROMPT,), {"cache_implementation": "quantized"}, None),
        ((PROMPT, CONFIG), {}, None),
        ((PROMPT,), {"return_dict_in_generate": True}, None),
        ((PROMPT,), {"output_attentions": True}, None),
    ],
)
def test_calls_with_a_cache_of_their_own_stay_as_they_are(args, given, expected):
    assert rows_and_length(args, given, MODEL) == expected
    with torch.autocast("cpu", torch.bfloat16):
        assert rows_and_length(args, given, MODEL) is None
    assert rows_and_length(args, given, SimpleNamespace(**vars(MODEL) | {"training": True})) is None


def test_a_benchmark_has_the_times_of_prompt_and_token():
    model = llama()
    found = benchmark(lambda: tokens(model), "baseline,inference", model=model, budget_s=1)
    first, second = found.records
    assert first.tokens.tokens == second.tokens.tokens == 2 * 8
    assert first.p99_s == first.tokens.p99_s >= first.tokens.token_s > 0
    assert second.accuracy is None or second.accuracy.verdict in ("exact", "rounding")
    assert "tokens/s" in found.report().to_text()
    assert "tokens" in found.to_dict()["variants"][0]


@compiles
def test_a_static_cache_is_checked_call_by_call():
    model = llama()
    found = benchmark(lambda: tokens(model), "baseline,static_cache", model=model, budget_s=60)
    accuracy = found.records[1].accuracy
    assert accuracy is None or (accuracy.verdict == "exact" and accuracy.output_error < 1e-5)


@pytest.mark.parametrize("decodes", [True, False])
def test_a_search_tries_it_where_steps_pass_a_cache_and_nothing_it_replaces(decodes, hardware):
    facts = Facts(classes={WithGenerate: 1}, training=False, decodes=decodes, parameters=10)
    found = {one.name for one in candidates(hardware("cpu_avx512_bf16"), [facts])}
    assert ("static_cache" in found) is decodes
    assert bool({"compile", "inference"} & found) is not decodes

"""attention() matches the definition of each pattern, computed in float64, with every engine."""

import gc
import os
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from speedkit_jupyter import attention
from speedkit_jupyter.extras.kernels import attention as kernels
from speedkit_jupyter.extras.kernels import engine_choice
from speedkit_jupyter.extras.kernels.engine_choice import EngineChoice, PatternChoices, Prepared
from speedkit_jupyter.extras.kernels.engines import Shape, laid_out
from speedkit_jupyter.extras.kernels.patterns import OWNERS, composed, key_of, names_in, slopes_of
from speedkit_jupyter.rounds.budget import graphs
from speedkit_jupyter.support.exceptions import ArgumentError

OLD_CPU = os.getenv("ATEN_CPU_CAPABILITY") == "default" or not torch.cpu._is_avx2_supported()
needs_avx2 = pytest.mark.skipif(OLD_CPU, reason="FlexAttention on a CPU needs AVX2")
Tensor = torch.Tensor
ROWS, HEADS, WIDTH, LONGEST = 2, 4, 16, 256
# Numbers of queries, keys and key heads. Some are odd, and some are less than a block.
SHAPES = [(128, 128, 4), (131, 131, 2), (200, 77, 4), (1, 150, 1), (150, 3, 4)]
# Document ids by position. BY_ROW has ids for each row; negative ids in PADDED are padding.
IDS = torch.arange(LONGEST) // 45
BY_ROW = torch.stack([IDS, (torch.arange(LONGEST) > 100).long()])
PADDED = torch.where(torch.arange(LONGEST) < 90, IDS, -1)
PREFIXES = torch.tensor([2, 90])
SLOPES = torch.tensor([0.5, 0.1, 0.0, 2.0])
BIAS = torch.linspace(-1, 1, HEADS * LONGEST).view(HEADS, LONGEST)


class Case(NamedTuple):
    """A pattern, and its definition: the mask `seen()` and the changed scores `changed()`."""

    words: str
    seen: Callable[[int, Tensor, Tensor], Any] = lambda row, q, k: k <= q
    changed: Callable[[Tensor, int, Tensor, Tensor], Tensor] = lambda score, head, q, k: score
    options: dict[str, Any] = {}


CASES = {
    "full": Case("full", lambda row, q, k: k >= 0),
    "causal": Case("causal"),
    "window": Case("sliding_window", lambda row, q, k: (q - 9 < k) & (k <= q),
                   options={"window": 9}),
    "window of both sides": Case(
        "sliding_window", lambda row, q, k: (q - 3 <= k) & (k <= q + 70),
        options={"window": (3, 70)}),
    "empty window": Case("sliding_window", lambda row, q, k: (q < k) & (k <= q + 5),
                         options={"window": (-1, 5)}),
    "prefix": Case("prefix", lambda row, q, k: (k < 20) | (k <= q), options={"prefix": 20}),
    "prefix of each row": Case("prefix", lambda row, q, k: (k < PREFIXES[row]) | (k <= q),
                               options={"prefix": PREFIXES}),
    "documents": Case("documents", lambda row, q, k: IDS[q] == IDS[k], options={"documents": IDS}),
    "documents of each row": Case(
        "causal+documents", lambda row, q, k: (BY_ROW[row][q] == BY_ROW[row][k]) & (k <= q),
        options={"documents": BY_ROW}),
    "padding": Case("documents", lambda row, q, k: (PADDED[q] == PADDED[k]) & (PADDED[q] >= 0),
                    options={"documents": PADDED}),
    "alibi": Case("causal+alibi", changed=lambda score, head, q, k: score
                  - slopes_of(HEADS)[head] * (q - k).abs()),
    "own slopes": Case("sliding_window+alibi", lambda row, q, k: (q - 9 < k) & (k <= q),
                       lambda score, head, q, k: score - SLOPES[head] * (q - k).abs(),
                       {"window": 9, "slopes": SLOPES}),
    "softcap": Case("causal+softcap", changed=lambda score, *_: 2 * (score / 2).tanh(),
                    options={"cap": 2.0}),
    "own mask": Case("causal", lambda row, q, k: (k <= q) & (k % 3 == 0),
                     options={"mask_mod": lambda b, h, q, k: k % 3 == 0}),
    "first keys and a window": Case(
        "causal", lambda row, q, k: (k <= q) & ((k < 4) | (q - k < 9)),
        options={"mask_mod": lambda b, h, q, k: (k < 4) | (q - k < 9)}),
    "own mask of each head": Case(
        "full", lambda row, q, k: k != 1, lambda score, head, q, k: score.masked_fill(
            k % (head + 1) != 0, -torch.inf),
        {"mask_mod": lambda b, h, q, k: (k % (h + 1) == 0) & (k != 1)}),
    "own score": Case("softcap", lambda row, q, k: k >= 0, lambda score, head, q, k:
                      2 * (score / 2).tanh() + BIAS[head][k], {
                          "cap": 2.0, "score_mod": lambda s, b, h, q, k: s + BIAS[h, k]}),
}  # fmt: skip


def reference(q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
    """Return attention by its definition, computed one row and head at a time."""
    at_q, at_k = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None]
    group = q.shape[1] // k.shape[1]
    found = []
    for row in range(q.shape[0]):
        for head in range(q.shape[1]):
            keys, values = k[row, head // group], v[row, head // group]
            scores = q[row, head] @ keys.T * q.shape[-1] ** -0.5
            scores = case.changed(scores, head, at_q, at_k)
            scores = scores.masked_fill(~case.seen(row, at_q, at_k), -torch.inf)
            is_empty = scores.isneginf().all(1, keepdim=True)
            weights = scores.masked_fill(is_empty, 0.0).softmax(-1).masked_fill(is_empty, 0.0)
            found.append(weights @ values)
    return torch.stack(found).view(*q.shape[:2], *found[0].shape)


def drawn(queries: int, keys: int, key_heads: int) -> list[Tensor]:
    """Return random queries, keys and values in float64."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(ROWS, HEADS, queries, WIDTH), *[(ROWS, key_heads, keys, WIDTH)] * 2]
    made = (torch.randn(*one, generator=generator, dtype=torch.float64) for one in shapes)
    return [one.requires_grad_() for one in made]


def floats(queries: int = 150, keys: int = 150, key_heads: int = HEADS) -> list[Tensor]:
    return [one.detach().float() for one in drawn(queries, keys, key_heads)]


def given(case: Case, length: int) -> dict[str, Any]:
    """Return the options of a case, with documents cut to `length`."""
    options = dict(case.options)
    if "documents" in options:
        options["documents"] = options["documents"][..., :length]
    return options


@pytest.mark.parametrize("engine", ["dense", "chunks"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=[*CASES])
def test_a_pattern_is_its_definition_and_so_are_its_gradients(case, shape, engine):
    exact = drawn(*shape)
    inputs = [one.requires_grad_() for one in floats(*shape)]
    found = attention(*inputs, case.words, engine=engine, **given(case, max(shape[:2])))
    wanted = reference(*exact, case)
    torch.testing.assert_close(found.double(), wanted, atol=2e-6, rtol=1e-5)
    weights = torch.linspace(0, 1, wanted.numel(), dtype=torch.float64).view(wanted.shape)
    gradients = torch.autograd.grad((found * weights.float()).sum(), inputs)
    exact_gradients = torch.autograd.grad((wanted * weights).sum(), exact)
    doubles = [one.double() for one in gradients]
    torch.testing.assert_close(doubles, [*exact_gradients], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["window", "softcap", "alibi", "documents of each row"])
def test_half_precision_is_off_by_its_rounding(name):
    inputs, case = floats(), CASES[name]
    halves = [one.bfloat16() for one in inputs]
    found = attention(*halves, case.words, **given(case, 150))
    with torch.autocast("cpu", torch.bfloat16):
        cast = attention(*inputs, case.words, **given(case, 150))
    assert found.dtype == cast.dtype == torch.bfloat16
    wanted = reference(*(one.double() for one in halves), case)
    for one in (found, cast):
        torch.testing.assert_close(one.double(), wanted, atol=2e-2, rtol=2e-2)


def test_slopes_are_learned_step_after_step():
    q, k, v = floats()
    slopes = SLOPES.clone().requires_grad_()
    for _ in range(2):
        found = attention(q, k, v, "causal+alibi", slopes=slopes)
        (gradient,) = torch.autograd.grad(found.sum(), slopes)
        assert gradient.isfinite().all()
        assert gradient.abs().max() > 0
        fixed = attention(q, k, v, "causal+alibi", slopes=slopes.detach())
        torch.testing.assert_close(found, fixed, atol=2e-6, rtol=1e-5)
        with torch.no_grad():
            slopes.mul_(0.5)


def test_a_long_sequence_costs_what_its_window_costs():
    prepared = prepared_for("sliding_window", window=64)
    shape = Shape(1, 1, 1, 4096, 4096, torch.float32, torch.device("cpu"))
    found = prepared.made(laid_out, shape, 64)
    assert found.share * 4096 <= 64 + 63
    masks = {id(one.mask) for _, blocks in found.rows for one in blocks}
    assert len(masks) <= 3  # inner blocks share one mask


def prepared_for(words: str, **options: Any) -> Prepared:
    """Return the Prepared that attention() makes from a pattern."""
    options = {**dict.fromkeys([*OWNERS, "mask_mod", "score_mod"]), **options}
    return Prepared(composed(names_in(words, options), options), {}, PatternChoices())


def test_masks_are_made_once_and_anew_where_documents_were_written_to():
    q, k, v = floats()
    ids = IDS[:150].clone()
    before = attention(q, k, v, "documents", documents=ids)
    masks = lambda: [id(one) for kept in kernels._MASKS.values() for one in kept.values()]  # noqa: E731
    kept = masks()
    attention(q, k, v, "documents", documents=ids.clone())
    assert masks() == kept
    ids.zero_()
    after = attention(q, k, v, "documents", documents=ids)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, attention(q, k, v))
    for window in range(1, 40):
        attention(q, k, v, "sliding_window", window=window)
    assert len(kernels._MASKS) == engine_choice.MOST_KEPT


reach = 3


class Reach:
    length = 3

    def seen(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q - k < self.length


def functions_that_read() -> dict[str, tuple[Callable[..., Tensor], Callable[[int], Any], bool]]:
    """Return mask functions by name, each with a setter and whether its mask is cached."""
    cell, defaults, owner = 3, [3], Reach()
    ids, long = torch.tensor(3), torch.full((2**18,), 3)

    def by_cell(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q - k < cell

    def set_cell(value: int) -> None:
        nonlocal cell
        cell = value

    def by_default(b: Tensor, h: Tensor, q: Tensor, k: Tensor, most: Any = defaults) -> Tensor:
        return q - k < most[0]

    return {
        "a global name": (
            lambda b, h, q, k: q - k < reach, lambda n: globals().update(reach=n), True),
        "a variable": (by_cell, set_cell, True),
        "torch's functions": (lambda b, h, q, k: torch.where(q > k, q - k < cell, q == k),
                              set_cell, True),
        "a default": (by_default, lambda n: defaults.__setitem__(0, n), True),
        "a tensor, by NumPy": (lambda b, h, q, k: q - k < ids, ids.numpy().fill, True),
        "a long tensor": (lambda b, h, q, k: q - k < long[h], long.fill_, True),
        "a method": (owner.seen, lambda n: setattr(owner, "length", n), False),
        "an attribute": (lambda b, h, q, k: q - k < owner.length,
                         lambda n: setattr(owner, "length", n), False),
    }  # fmt: skip


@pytest.mark.parametrize("name", functions_that_read())
def test_a_mask_follows_what_its_function_reads(name):
    seen, change, is_kept = functions_that_read()[name]
    inputs = floats()
    for number in (3, 80, 3):
        change(number)
        wanted = attention(*inputs, "sliding_window", window=number, engine="dense")
        for engine in ("auto", "dense", "chunks"):
            found = attention(*inputs, "causal", mask_mod=seen, engine=engine)
            torch.testing.assert_close(found, wanted, atol=2e-6, rtol=1e-5)
    assert (key_of(seen) is not None) == is_kept


NAMES = ["window", "own mask", "softcap", "alibi", "first keys and a window"]


@pytest.mark.parametrize("written", [0, 1, 2])
@pytest.mark.parametrize("engine", ["auto", "dense", "chunks"])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_to_before_the_backward_pass_is_an_error(name, engine, written):
    case = CASES[name]
    inputs = [one.requires_grad_().mul(1) for one in floats(200, 200)]
    found = attention(*inputs, case.words, engine=engine, **given(case, 200))
    with torch.no_grad():
        inputs[written].mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.sum().backward()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("engine", ["auto", "chunks"])
@pytest.mark.parametrize("name", [*NAMES, "causal", "documents", "prefix"])
def test_transforms_of_functions_give_the_same(name, engine):
    case, inputs = CASES[name], floats(130, 130, 2)
    options, several = given(case, 130), [torch.stack([one, 2 * one]) for one in inputs]

    def loss(*inputs: Tensor) -> Tensor:
        return attention(*inputs, case.words, engine=engine, **options).square().sum()

    gradients = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)))(*several)
    for number in range(2):
        alone = [one[number].clone().requires_grad_() for one in several]
        wanted = torch.autograd.grad(loss(*alone), alone)
        found = [one[number] for one in gradients]
        torch.testing.assert_close(found, [*wanted], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["softcap", "own score"])
def test_gradients_of_gradients_are_those_of_one_call(name):
    case, found = CASES[name], []
    for engine in ("dense", "chunks"):
        inputs = drawn(130, 130, 2)
        one = attention(*inputs, case.words, engine=engine, **given(case, 130))
        first = torch.autograd.grad(one.square().sum(), inputs, create_graph=True)
        found.append(torch.autograd.grad(sum(part.square().sum() for part in first), inputs))
    torch.testing.assert_close(*found)


def test_biases_that_each_step_computes_keep_no_graph():
    inputs, raw, alive = floats(), torch.zeros(HEADS, requires_grad=True), []
    kernels._MASKS.clear()
    for _ in range(3):
        slopes, bias = raw.exp(), raw * 2
        alive += [weakref.ref(slopes), weakref.ref(bias)]
        options = {"slopes": slopes, "score_mod": lambda s, b, h, q, k, bias=bias: s + bias[h]}
        attention(*inputs, "causal+alibi", **options).sum().backward()
    assert len(kernels._MASKS) == 1
    del slopes, bias, options
    gc.collect()
    assert [one() for one in alive] == [None] * 6


@pytest.mark.parametrize("name", ["window", "softcap", "alibi"])
@pytest.mark.parametrize("lengths", [(0, 150), (150, 0)])
def test_no_queries_or_no_keys_and_tensors_without_values(name, lengths):
    case, inputs = CASES[name], [one.requires_grad_() for one in floats(*lengths)]
    found = attention(*inputs, case.words, **given(case, 150))
    found.sum().backward()
    assert found.shape == inputs[0].shape
    assert not found.any()
    meta = attention(*(one.to("meta") for one in floats()), case.words, **given(case, 150))
    assert meta.shape == (ROWS, HEADS, 150, WIDTH)


def test_masks_made_without_gradients_serve_with_them():
    inputs = [one.requires_grad_() for one in floats()]
    with torch.inference_mode():
        attention(*inputs, "sliding_window", window=17)
    attention(*inputs, "sliding_window", window=17).sum().backward()
    assert all(one.grad.isfinite().all() for one in inputs)


@pytest.mark.parametrize(
    ("words", "options", "length", "engine"),
    [
        ("full", {}, 150, "dense"),
        ("causal", {}, 100, "dense"),
        ("causal", {}, 150, "chunks"),
        ("causal", {}, 1100, "dense"),
        ("sliding_window", {"window": 20}, 200, "chunks"),
        ("sliding_window", {"window": 20}, 100, "dense"),
        ("full", {"mask_mod": lambda b, h, q, k: k != 5}, 200, "dense"),
        ("causal+softcap", {"cap": 2.0}, 200, "chunks"),
    ],
)
def test_the_rule_takes_chunks_where_they_leave_out_enough(words, options, length, engine):
    shape = Shape(ROWS, HEADS, HEADS, length, length, torch.float32, torch.device("cpu"))
    assert prepared_for(words, **options).by_rule(shape, trains=True).engine == engine
    assert prepared_for("causal").by_rule(shape, trains=False).engine == "dense"


def test_tuning_measures_a_shape_once_and_the_session_remembers(monkeypatch):
    monkeypatch.setattr(kernels, "_KNOWN", {})
    monkeypatch.setattr(engine_choice, "SIZES", (64, 128))
    inputs = [one.requires_grad_() for one in floats()]
    plain = attention(*inputs, "sliding_window", window=5)
    torch.testing.assert_close(attention(*inputs, "sliding_window", window=5, tune=True), plain)
    (known,) = kernels._KNOWN.values()
    assert len(known.choices) == 1
    monkeypatch.setattr(Prepared, "measured", None)
    attention(*inputs, "sliding_window", window=5, tune=True)
    attention(*inputs, "sliding_window", window=5)
    assert all(one.grad is None for one in inputs)


@pytest.mark.parametrize(("dense_s", "taken"), [(1.0, "dense"), (1.99, "chunks")])
def test_the_fastest_is_taken_where_it_is_faster_than_the_rules(dense_s, taken):
    dense, chunks = EngineChoice("dense"), EngineChoice("chunks", 64)
    assert engine_choice.fastest({dense: [dense_s], chunks: [2.0]}, chunks).engine == taken


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda q: attention(q, q, q, "slidingwindow", window=3), "Did you mean 'sliding_window'"),
        (lambda q: attention(q, q, q, "sliding_window"), "needs window="),
        (lambda q: attention(q, q, q, "causal", window=3), "window=3 belongs to sliding_window"),
        (lambda q: attention(q, q, q, "sliding_window", window=(1, 2, 3)), "(left, right)"),
        (lambda q: attention(q, q, q, "causal", engine="chunk"), "Did you mean 'chunks'"),
        (lambda q: attention(q[0], q[0], q[0]), "(batch, heads, length, head_dim)"),
        (lambda q: attention(q, q[:, :3], q[:, :3]), "do not fit together"),
        (lambda q: attention(q, q, q, "documents", documents=IDS[:7]), "must be (150,)"),
    ],
)
def test_what_does_not_fit_is_said(call, says):
    with pytest.raises(ArgumentError) as caught:
        call(floats()[0])
    assert says in str(caught.value)
    assert not [entry for entry in caught.traceback if entry.name == "_checked"]


@pytest.mark.compile
@pytest.mark.slow
@needs_avx2
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["window", "documents of each row", "softcap", "alibi"])
def test_flexattention_gives_the_same(name):
    case = CASES[name]
    inputs = floats(131, 131, 2)
    with torch.no_grad():
        learned = [one.clone().requires_grad_() for one in inputs]
        found = attention(*learned, case.words, engine="flex", **given(case, 131))
    torch.testing.assert_close(
        found, attention(*inputs, case.words, **given(case, 131)), atol=2e-6, rtol=1e-5
    )


@pytest.mark.compile
@pytest.mark.slow
@needs_avx2
def test_other_documents_are_not_compiled_anew():
    inputs, compiled = floats(), []
    with torch.no_grad():
        for ids in (IDS[:150], IDS[:150] + 1, IDS[:150] // 2):
            found = attention(*inputs, "causal+documents", documents=ids, engine="flex")
            plain = attention(*inputs, "causal+documents", documents=ids)
            torch.testing.assert_close(found, plain, atol=2e-6, rtol=1e-5)
            compiled.append(graphs())
    assert len({*compiled}) == 1


@pytest.mark.compile
@pytest.mark.slow
def test_compiled_code_leaves_attention_as_it_is():
    inputs = floats()

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q * 2, k, v, "sliding_window", window=20) + 1

    torch.testing.assert_close(torch.compile(step)(*inputs), step(*inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["auto", "dense", "chunks", "flex"])
@pytest.mark.parametrize("case", CASES.values(), ids=[*CASES])
def test_a_gpu_gives_the_same(case, engine):
    exact = drawn(256, 256, 2)
    inputs = [one.detach().float().cuda().requires_grad_() for one in exact]
    options = {
        name: one.cuda() if isinstance(one, Tensor) else one
        for name, one in given(case, 256).items()
        if "mod" not in name
    }
    if len(options) < len(case.options):
        pytest.skip("a function of tensors on the CPU")
    found = attention(*inputs, case.words, engine=engine, **options)
    wanted = reference(*exact, case)
    torch.testing.assert_close(found.cpu().double(), wanted, atol=5e-3, rtol=5e-3)
    gradients = torch.autograd.grad(found.sum(), inputs)
    for one, other in zip(gradients, torch.autograd.grad(wanted.sum(), exact), strict=True):
        torch.testing.assert_close(one.cpu().double(), other, atol=2e-2, rtol=2e-2)

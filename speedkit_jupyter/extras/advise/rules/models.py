"""Rules about models: their batches, their modules, their numbers and their settings."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from speedkit_jupyter.catalog import named
from speedkit_jupyter.catalog.base.decision import Effect
from speedkit_jupyter.extras.advise import trials
from speedkit_jupyter.extras.advise.advice import EXACT, Gain, Opportunity, amdahl, without
from speedkit_jupyter.extras.advise.observed_call import ObservedModelCall, is_called
from speedkit_jupyter.extras.advise.situation import Situation
from speedkit_jupyter.extras.kernels.attention import attention
from speedkit_jupyter.extras.kernels.patterns import recognized
from speedkit_jupyter.extras.profile.split import Part
from speedkit_jupyter.search.candidates import Candidate
from speedkit_jupyter.support.units import ratio, share
from speedkit_jupyter.torchglue.private import SDPA, SOFTMAX

# A batch of up to MOST_ROWS is tried LARGER times as large: a model of large operators takes LARGER
# times as long then, and one of small operators hardly longer.
MOST_ROWS, LARGER = 8, 4
# This many calls with one row each are a loop over samples.
LEAST_CALLS = 4
COMPUTING: tuple[Part, ...] = ("forward", "backward")
# The parts of the step that a switch makes faster, with its least and greatest measured speed-up of
# them (docs/results.md; notebooks/06_catalog.ipynb).
WORTH: dict[str, tuple[tuple[Part, ...], float, float]] = {
    "precision": (COMPUTING, 1.1, 4.0),
    "tf32": (COMPUTING, 1.1, 5.0),
    "gemm": (COMPUTING, 1.0, 2.0),
    "channels_last": (COMPUTING, 0.97, 1.6),
    "fused_optimizer": (("optimizer",), 1.2, 8.0),
    "cudnn_benchmark": (COMPUTING, 1.0, 1.5),
    "device": ((*COMPUTING, "optimizer", "rest"), 1.5, 50.0),
    "threads": (COMPUTING, 1.1, 4.0),
}


def padding(seen: Situation) -> Iterator[Opportunity]:
    """Find batches of words that are mostly padding."""
    found = [one for one in map(padded, seen.inputs) if one is not None]
    if not found or seen.computing < 0.2:
        return
    everywhere, behind = (sum(each) / len(found) for each in zip(*found, strict=True))
    if everywhere < 0.25:
        return
    # Cutting the columns behind the longest row is the least, batches of similar lengths the most;
    # work by rows and not by words does not get faster.
    most = seen.computing * max(everywhere, behind)
    low, high = without(seen.computing * behind * 0.6), without(min(most, 0.95))
    yield Opportunity(
        "pad each batch to its own longest row, with rows of similar length together",
        f"{share(everywhere)} of the words are padding, {share(behind)} of all are behind the "
        f"longest row of their batch; forward and backward: {share(seen.computing)} of the step",
        Gain(low, max(low, high)),
        "pad in collate_fn (pad_sequence, or DataCollatorWithPadding), and sort into buckets by "
        "length",
        "batches of similar lengths come in another order",
        share=most,
    )


def padded(words: torch.Tensor) -> tuple[float, float] | None:
    """Return the shares of padding, and of columns behind the longest row, in rows of integers.

    Padding is the most frequent value of the last column. None for other tensors.
    """
    if words.dim() != 2 or words.is_floating_point() or words.shape[1] < 8:
        return None
    lowest, highest = int(words.min()), int(words.max())
    # A mask, the numbers of two segments, and a constant are no words.
    if lowest == highest or (lowest >= 0 and highest <= 1):
        return None
    values, times = words[:, -1].unique(return_counts=True)
    is_word, width = words != values[times.argmax()], words.shape[1]
    lengths = width - is_word.flip(1).int().argmax(1)  # up to the last word of each row
    lengths[~is_word.any(1)] = 0
    if not (lengths < width).any():
        return None
    return 1 - float(lengths.sum()) / words.numel(), 1 - int(lengths.max()) / width


def small_batch(seen: Situation) -> Iterator[Opportunity]:
    """Find a batch so small that calling operators takes longer than their work, by a trial."""
    calls = seen.calls
    if not (calls and seen.trains) or seen.computing < 0.3:
        return
    sizes = {one.shape[0] for one in calls[0].inputs if one.dim() > 1}
    rows = sizes.pop() if len(sizes) == 1 else MOST_ROWS + 1
    # Many calls with one row each are another rule's matter.
    if rows > MOST_ROWS or (rows == 1 and len(calls) > LEAST_CALLS):
        return
    ratio = seen.ratio(calls[0].with_rows(LARGER), calls[0])
    each = 0.0 if ratio is None else LARGER / ratio
    if each < 2.0:  # times as fast for each sample
        return
    whole = seen.computing + seen.share("optimizer", "rest", "synchronizations")
    yield Opportunity(
        f"take a larger batch than {rows}",
        f"the model takes {LARGER / each:.2f} times as long for {LARGER} times the batch",
        Gain(1 / (1 - whole * (1 - 1 / each) * 0.6), 1 / (1 - whole * (1 - 1 / (2 * each)))),
        f"batch_size={LARGER * rows}, and a learning rate for it: samples a second gain, not steps",
        "another batch is another training: its learning rate and results differ",
    )


def one_by_one(seen: Situation) -> Iterator[Opportunity]:
    """Find a model that is called sample by sample, by a trial with many samples."""
    groups = defaultdict[tuple[int, int], list[ObservedModelCall]](list)
    for call in seen.calls:
        groups[id(call.module), call.step].append(call)
    calls = max(groups.values(), key=len, default=[])
    shapes = {tuple(tuple(one.shape) for one in call.inputs) for call in calls}
    if len(calls) < LEAST_CALLS or len(shapes) > 1 or not any(shapes):
        return
    has_rows = any(len(shape) > 1 and shape[0] > 1 for shape in min(shapes))
    classes = [type(one).__name__ for one in calls[0].module.modules()]
    sees_batch = calls[0].training and any("BatchNorm" in name for name in classes)
    is_chained = any(one.grad_fn is not None for call in calls[1:] for one in call.inputs)
    if has_rows or sees_batch or is_chained:
        return
    rows = min(len(calls), 64)  # more rows would hardly show a larger gain
    times = (seen.ratio(calls[0], calls[0].with_rows(rows)) or 0.0) * rows
    if times < 1.3:
        return
    # Rows that are parts of the same tensors existed before the first call.
    places = [[one.untyped_storage().data_ptr() for one in call.inputs] for call in calls]
    at_hand = all(place == places[0] for place in places)
    around = seen.computing + (seen.share("rest", "synchronizations") if at_hand else 0.0)
    shape = "×".join(map(str, calls[0].inputs[0].shape))
    yield Opportunity(
        f"call {seen.name(calls[0].module, 'the model')} once with all rows",
        f"{len(calls)} calls in a step, each with one row of shape {shape}; one call with {rows} "
        f"rows is {times:.1f} times as fast; the loop: {share(around)} of the step",
        Gain(amdahl(seen.computing, max(times * 0.5, 1.05)).low, amdahl(around, times * 2.0).low),
        "model(torch.stack(rows)) in place of the loop",
        "batch norm in training sees the whole batch"
        if at_hand
        else "only where no row is made of what an earlier call gave (a roll-out's, a text's)",
    )


def recurrent_cells(seen: Situation) -> Iterator[Opportunity]:
    """Find recurrent cells in a Python loop, where torch has the whole layer."""
    for kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell):
        calls = seen.observed.times[kind] / seen.steps
        names = {seen.name(one, "") for one in seen.modules if type(one) is kind}
        taken, every = seen.module_share(names), seen.module_share()
        # Without times of modules the cells count as all of them, as they usually are.
        taken = seen.computing * (taken / every if every else 1.0)
        if calls < 8 or taken < 0.1:
            continue
        layer = kind.__name__.removesuffix("Cell")
        yield Opportunity(
            f"nn.{layer} over the whole sequence in place of nn.{kind.__name__}",
            f"{calls:.0f} calls of nn.{kind.__name__} in a step, {share(taken)} of it",
            amdahl(taken, 1.1, 8.0),
            f"nn.{layer}(…, batch_first=True)(sequence), where no moment's input depends on "
            "the output of the moment before",
            "its weights have other names: weight_ih becomes weight_ih_l0",
        )


def same_forward_twice(seen: Situation) -> Iterator[Opportunity]:
    """Find a model that is called again on the same tensors, with the same weights."""
    keys, again = set[object](), list[ObservedModelCall]()
    for call in seen.calls:
        if call.key in keys and call.inputs and not call.has_dropout:
            again.append(call)
        keys.add(call.key)
    for call in {id(one.module): one for one in again}.values():
        twice = len(again) / len(seen.calls)
        taken = seen.share("forward") * twice
        if taken < 0.03:
            continue
        # The second call's backward pass, if it has any, goes too.
        graphs = call.has_graph and len(seen.observed.backwards) >= len(seen.calls)
        most = min(taken + (seen.share("backward") * twice if graphs else 0.0), 0.9)
        called = seen.name(call.module, "the model")
        yield Opportunity(
            f"keep the output of {called}, and use it twice",
            f"{called} is called again with the same input: about {share(most)} of the step",
            Gain(amdahl(taken, 3.0).low, without(most)),
            f"out = {called}(x) once; `out.detach()` for uses that need no gradient",
        )


def double_precision(seen: Situation) -> Iterator[Opportunity]:
    """Find models that compute in float64."""
    computing = seen.share(*COMPUTING, "optimizer")
    calls = (one.module for one in seen.calls)
    double = (one for one in calls if any(p.dtype == torch.float64 for p in one.parameters()))
    if (model := next(double, None)) is None or computing < 0.1:
        return
    called = seen.name(model, "the model")
    yield Opportunity(
        f"compute in float32: {called} is in float64",
        f"{called}'s parameters are float64; forward, backward and optimizer: "
        f"{share(computing)} of the step",
        # Twice the bytes, half the numbers in a vector; on most GPUs a 32nd of the rate.
        amdahl(computing, 1.25, 3.0) if seen.on_cpu else amdahl(computing, 1.5, 20.0),
        f"{called}.float(), and x.float() (NumPy's numbers are float64)",
        "7 digits in place of 16; an optimizer that has begun is made anew",
    )


def attention_by_hand(seen: Situation) -> Iterator[Opportunity]:
    """Find a softmax between two products, in code of the user's."""
    names = ("bmm", "baddbmm", "einsum", "matmul", "softmax", "masked_fill", "div")
    taken = min(seen.operators(SOFTMAX, *(f"aten::{name}" for name in names)), 0.9)
    for code in seen.observed.code if taken >= 0.05 else ():
        calls = [*code.nodes(ast.Call)]
        softmax = next((call for call in calls if is_called(call, "softmax")), None)
        products = sum(is_called(call, "matmul", "bmm", "einsum") for call in calls)
        products += sum(isinstance(node.op, ast.MatMult) for node in code.nodes(ast.BinOp))
        if softmax is None or products < 2:
            continue
        spots = code.spots(softmax)
        yield Opportunity(
            "F.scaled_dot_product_attention in place of softmax(q @ k) @ v",
            f"{seen.profile.place(spots[0])}: softmax between two products; products of batches "
            f"and softmax: {share(taken)} of the step",
            amdahl(taken, 1.05, 3.5),
            "F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=…)",
            "rounding; the attention weights themselves are no longer there",
            spots=spots,
        )


def dense_mask(seen: Situation) -> Iterator[Opportunity]:
    """Find a dense mask given to SDPA that is a pattern, by its values."""
    is_known = seen.profile.costs is not None  # else the share is at most that of all computing
    sdpa = seen.operators("aten::scaled_dot_product", SDPA)
    taken = min(sdpa if is_known else seen.computing, 0.95)
    for call in seen.observed.attentions.values() if taken >= 0.05 else ():
        q, k, v, mask = call.args
        queries, keys = q.shape[-2], k.shape[-2]
        found = recognized(mask, queries, keys) if q.dim() == 4 else None
        if found is None or (call.keywords["dropout_p"] and not found.is_plain):
            continue
        plain, scale = partial(call, dropout_p=0.0), call.keywords.get("scale")
        tried = partial(attention, q, k, v, found.words, scale=scale, **found.options)
        with torch.no_grad():
            off = (tried() - plain()).abs().max()
            is_same = bool(off <= 8 * torch.finfo(q.dtype).eps * v.abs().max())
        if not is_same or (times := seen.ratio(plain, tried)) is None:
            continue
        gain = amdahl(taken, max(0.7 * times, 1.0), max(1.3 * times, 1.0))
        given = "" if found.is_plain else "; from speedkit_jupyter import attention"
        yield Opportunity(
            f"{found.words} attention without its dense mask",
            f"a mask of {queries:,}×{keys:,} is {found.words}, which sees {share(found.share)} of "
            f"the scores: every value was compared. Without it attention took {ratio(times)} less "
            f"time; attention: {'' if is_known else 'at most '}{share(taken)} of the step",
            gain if is_known else gain._replace(low=1.0),
            f"{found.code}{given}",
            "rounding",
            trial=trials.by_pattern(mask, found),
        )
        return


def sparse_products(seen: Situation) -> Iterator[Opportunity]:
    """Find products with a matrix that is almost all zeros: an input of a model, or its buffer."""
    products = ("aten::mm", "aten::addmm", "aten::bmm", "aten::matmul", "aten::linear")
    taken = min(seen.operators(*products), 0.95)
    given = [*seen.inputs, *(one for model in seen.models for one in model.buffers())]
    for matrix in {id(one): one for one in given}.values() if taken >= 0.1 else ():
        is_dense = matrix.layout is torch.strided and matrix.is_floating_point()
        if not is_dense or matrix.dim() != 2 or matrix.numel() < 500_000:
            continue
        full = float(matrix.count_nonzero()) / matrix.numel()
        if not 0 < full <= 0.02:
            continue
        name, (rows, columns) = seen.name(matrix, "the matrix"), matrix.shape
        yield Opportunity(
            f"{name} as a sparse tensor",
            f"{name} ({rows:,}×{columns:,}) is zero in {100 * (1 - full):.4g} % of its "
            f"places; products of matrices: {share(taken)} of the step",
            # Sparse kernels take some ten times as long for each number that is left.
            Gain(amdahl(taken * 0.5, 2.0).low, amdahl(taken, 1 / (10 * full)).low),
            f"{name}.to_sparse_csr() or .to_sparse(), made once, in front of the loop",
            "sums are added up in another order",
        )


def catalog(seen: Situation) -> Iterator[Opportunity]:
    """Find switches that `auto` would turn on, unless tuning has measured this model already."""
    known = set(seen.in_force)
    decisions = (one for plan in seen.plans for one in plan if one.active and one.name in WORTH)
    for decision in decisions if not seen.is_tuned else ():
        parts, least, most = WORTH[decision.name]
        part = seen.share(*parts)
        if part < 0.05 or decision.name in known:
            continue
        known.add(decision.name)
        word, value = Candidate({decision.name: decision.value}).name, decision.value
        is_exact = named(decision.name).effect is Effect.EXACT
        yield Opportunity(
            f"turn on {word}",
            f"{' and '.join(parts)}: {share(part)} of the step; {decision.reason}",
            amdahl(part, least, most),
            f"%speedkit apply --{decision.name.replace('_', '-')} {value}".replace("True", "true"),
            EXACT if is_exact else "rounding, which the comparison checks",
            variant=word,
        )

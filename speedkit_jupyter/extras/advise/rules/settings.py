"""Rules about settings: of torch, of the machine, and of this package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import partial

import torch

from speedkit_jupyter.catalog import named
from speedkit_jupyter.catalog.base.decision import Effect
from speedkit_jupyter.extras.advise import trials
from speedkit_jupyter.extras.advise.advice import EXACT, Gain, Opportunity, amdahl, without
from speedkit_jupyter.extras.advise.code import is_called
from speedkit_jupyter.extras.advise.situation import Situation
from speedkit_jupyter.extras.kernels.attention import attention
from speedkit_jupyter.extras.kernels.patterns import recognized
from speedkit_jupyter.extras.profile.split import Part
from speedkit_jupyter.search.candidates import Candidate
from speedkit_jupyter.support.units import ratio, share
from speedkit_jupyter.torchglue import private
from speedkit_jupyter.torchglue.private import SOFTMAX

# Held up for longer than this share of the time, a step takes up to four times its own.
HELD_UP = 0.75


def busy_machine(seen: Situation) -> Iterator[Opportunity]:
    """Find, on a CPU, a step that waits for cores that other processes hold.

    Threads that wait for one another lose most: one that has no core holds up all the others.
    """
    computing = seen.share("forward", "backward", "optimizer")
    waiting = seen.profile.held_up_s / max(seen.profile.timed_s, 1e-9)
    if seen.on_cpu and computing >= 0.3 and waiting >= 0.3:
        yield Opportunity(
            "wait until the cores are free, or compute with one thread meanwhile",
            f"other processes hold the cores for {share(waiting)} of the time; forward, backward "
            f"and optimizer: {share(computing)} of the step",
            Gain(1.0, without(min(waiting, computing, HELD_UP))),
            "stop what else runs (`top` lists it), or `%speedkit apply --threads 1`",
            "rounding; one thread is slower once the cores are free",
            variant="threads:1",
        )


def double_precision(seen: Situation) -> Iterator[Opportunity]:
    """Find models that compute in float64."""
    computing = seen.share("forward", "backward", "optimizer")
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


ATTENTION = ("aten::bmm", "aten::baddbmm", SOFTMAX, "aten::softmax", "aten::matmul",
             "aten::masked_fill", "aten::div")  # fmt: skip


def attention_by_hand(seen: Situation) -> Iterator[Opportunity]:
    """Find a softmax between two products, in code of the user's."""
    taken = min(seen.operators(*ATTENTION), 0.9)
    for part in seen.code.parts if taken >= 0.05 else ():
        calls = [*part.nodes(ast.Call)]
        softmax = next((call for call in calls if is_called(call, "softmax")), None)
        products = sum(is_called(call, "matmul", "bmm", "einsum") for call in calls)
        products += sum(isinstance(node.op, ast.MatMult) for node in part.nodes(ast.BinOp))
        if softmax is None or products < 2:
            continue
        yield Opportunity(
            "F.scaled_dot_product_attention in place of softmax(q @ k) @ v",
            f"{seen.place(part, softmax)}: softmax between two products; products of batches "
            f"and softmax: {share(taken)} of the step",
            amdahl(taken, 1.05, 3.5),
            "F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=…)",
            "rounding; the attention weights themselves are not there any more",
            spots=part.spots(softmax),
        )


SDPA = ("aten::scaled_dot_product", private.SDPA)


def dense_mask(seen: Situation) -> Iterator[Opportunity]:
    """Find a dense mask given to SDPA that is a pattern, by its values."""
    is_known = seen.profile.costs is not None  # else it is all of what computes at most
    taken = min(seen.operators(*SDPA) if is_known else seen.computing, 0.95)
    for call in seen.watched.attentions.values() if taken >= 0.05 else ():
        queries, keys = call.q.shape[-2], call.k.shape[-2]
        found = recognized(call.mask, queries, keys) if call.q.dim() == 4 else None
        if found is None or (call.dropout_p and not found.is_plain):
            continue
        tried = partial(attention, call.q, call.k, call.v, found.words, scale=call.scale,
                        **found.options)  # fmt: skip
        with torch.no_grad():
            off = (tried() - call()).abs().max()
            is_same = bool(off <= 8 * torch.finfo(call.q.dtype).eps * call.v.abs().max())
        if not is_same or (times := seen.ratio(call, tried)) is None:
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
            trial=trials.by_pattern(call.mask, found),
        )
        return


# A matrix is sparse with this share of zeros; sparse kernels are this much slower for each number.
ZEROS, NUMBERS, SLOWER = 0.98, 500_000, 10


def sparse_products(seen: Situation) -> Iterator[Opportunity]:
    """Find products with a matrix that is almost all zeros: given to a model, or its buffer."""
    products = ("aten::mm", "aten::addmm", "aten::bmm", "aten::matmul")
    taken = min(seen.operators(*products), 0.95)
    given = [*seen.inputs, *(one for model in seen.models for one in model.buffers())]
    for matrix in {id(one): one for one in given}.values() if taken >= 0.1 else ():
        is_dense = matrix.layout is torch.strided and matrix.is_floating_point()
        if not is_dense or matrix.dim() != 2 or matrix.numel() < NUMBERS:
            continue
        full = float(matrix.count_nonzero()) / matrix.numel()
        if not 0 < full <= 1 - ZEROS:
            continue
        name, (rows, columns) = seen.name(matrix, "the matrix"), matrix.shape
        yield Opportunity(
            f"{name} as a sparse tensor",
            f"{name} ({rows:,}×{columns:,}) is zero in {100 * (1 - full):.4g} % of its "
            f"places; products of matrices: {share(taken)} of the step",
            Gain(amdahl(taken * 0.5, 2.0).low, amdahl(taken, 1 / (SLOWER * full)).low),
            f"{name}.to_sparse_csr() or .to_sparse(), made once, in front of the loop",
            "sums are added up in another order",
        )


COMPUTING: tuple[Part, ...] = ("forward", "backward")
EVERYTHING: tuple[Part, ...] = ("forward", "backward", "optimizer", "rest")
# What an entry makes faster, and how many times at the least and the most where it was measured
# (docs/results.md; notebooks/06_catalog.ipynb).
WORTH: dict[str, tuple[tuple[Part, ...], float, float]] = {
    "precision": (COMPUTING, 1.1, 4.0),
    "tf32": (COMPUTING, 1.1, 5.0),
    "gemm": (COMPUTING, 1.0, 2.0),
    "channels_last": (COMPUTING, 0.97, 1.6),
    "fused_optimizer": (("optimizer",), 1.2, 8.0),
    "cudnn_benchmark": (COMPUTING, 1.0, 1.5),
    "device": (EVERYTHING, 1.5, 50.0),
    "threads": (COMPUTING, 1.1, 4.0),
}


def catalog(seen: Situation) -> Iterator[Opportunity]:
    """Find entries that `auto` would turn on; once tuning measured, it has nothing to add."""
    told = set(seen.in_force)
    decisions = (one for plan in seen.plans for one in plan if one.active and one.name in WORTH)
    for decision in decisions if not seen.is_tuned else ():
        parts, least, most = WORTH[decision.name]
        part = seen.share(*parts)
        if part < 0.05 or decision.name in told:
            continue
        told.add(decision.name)
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

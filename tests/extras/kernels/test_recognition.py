"""A mask is recognized by its values, and what is not exactly a pattern is none."""

from __future__ import annotations

import pytest
import torch

from speedkit_jupyter.extras.kernels.patterns import recognized

LENGTH = 40
Q, K = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None]
IDS = torch.tensor([0] * 7 + [1] * 20 + [2] * 13)
BY_ROW = torch.stack([IDS, IDS.flip(0)])
MASKS = {
    "full": (Q >= 0) & (K >= 0),
    "causal": Q >= K,
    "sliding_window": (Q >= K) & (Q - K < 9),
    "prefix": (Q >= K) | (K < 5),
    "documents": IDS[:, None] == IDS[None],
    "causal+documents": (IDS[:, None] == IDS[None]) & (Q >= K),
}


@pytest.mark.parametrize("words", MASKS)
@pytest.mark.parametrize("form", ["bool", "float", "four dimensions", "heads"])
def test_a_pattern_is_recognized_in_every_form_of_mask(words, form):
    mask = MASKS[words]
    if form == "float":
        mask = torch.zeros(LENGTH, LENGTH).masked_fill(~mask, -torch.inf)
    elif form != "bool":
        mask = mask.expand(2 if form == "heads" else 1, 3 if form == "heads" else 1, -1, -1)
    found = recognized(mask, LENGTH, LENGTH)
    assert found is not None
    assert found.words == words
    assert found.share == pytest.approx(float(MASKS[words].float().mean()))


@pytest.mark.parametrize(
    ("mask", "code"),
    [
        (MASKS["causal"], "F.scaled_dot_product_attention(q, k, v, is_causal=True)"),
        (MASKS["sliding_window"], 'attention(q, k, v, "sliding_window", window=9)'),
        ((Q - K).abs() < 4, 'attention(q, k, v, "sliding_window", window=(3, 3))'),
        (MASKS["prefix"], 'attention(q, k, v, "prefix", prefix=5)'),
        (MASKS["documents"], 'attention(q, k, v, "documents", documents=documents)'),
    ],
)
def test_the_line_has_what_the_mask_says(mask, code):
    assert recognized(mask, LENGTH, LENGTH).code == code


def test_documents_and_prefixes_may_differ_between_rows_and_padding_is_seen_by_nothing():
    same = BY_ROW[:, :, None] == BY_ROW[:, None]
    assert recognized(same[:, None], LENGTH, LENGTH).words == "documents"
    prefixes = torch.tensor([4, 9]).view(2, 1, 1, 1)
    found = recognized((Q >= K) | (prefixes > K), LENGTH, LENGTH)
    assert found.options["prefix"].tolist() == [4, 9]
    padded = MASKS["documents"] & (IDS < 2)[:, None]
    found = recognized(padded, LENGTH, LENGTH)
    assert (found.options["documents"] < 0).sum() == 13


def one_value_off() -> torch.Tensor:
    mask = MASKS["sliding_window"].clone()
    mask[20, 15] = False
    return mask


@pytest.mark.parametrize(
    "mask",
    [
        one_value_off(),
        torch.stack([Q >= K, Q <= K])[None],  # heads that differ
        torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.5,
        -0.1 * (Q - K).abs().float(),  # a bias
        # Nothing seen, and not minus infinity: the average of all values.
        torch.full((LENGTH, LENGTH), torch.finfo(torch.float32).min),
        torch.zeros(LENGTH, LENGTH, requires_grad=True),
        (K < 30).expand(LENGTH, -1),  # padding of keys alone
    ],
    ids=["one value off", "heads", "random", "bias", "large number", "learned", "padding"],
)
def test_what_is_not_exactly_a_pattern_is_none(mask):
    assert recognized(mask, LENGTH, LENGTH) is None


def test_fewer_queries_than_keys_are_at_the_first_positions():
    assert recognized(MASKS["causal"][:10], 10, LENGTH).words == "causal"
    # The last ten, from the first position on: what a cache of keys gives.
    assert recognized(MASKS["causal"][-10:], 10, LENGTH).options == {"window": (9, 30)}

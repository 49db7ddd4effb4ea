"""Test that padding batches to few lengths keeps the samples, their order and the loss."""

from collections import UserDict, defaultdict
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from speedkit_jupyter import StepError, bucketed
from speedkit_jupyter.extras.data.bucketed import few_lengths, keeps_loss

ZERO = ("attention_mask", "token_type_ids", "position_ids")
SENTENCES = [torch.arange(1, length + 1) for length in (3, 5, 9, 2, 12, 20)]


def collate(rows):
    words = pad_sequence(rows, batch_first=True)
    labels = words.masked_fill(words == 0, -100)
    return UserDict(words=words, mask=words > 0, labels=labels, sizes=[len(one) for one in rows])


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_and_order_stay_and_new_places_are_masked(workers):
    plain = DataLoader(SENTENCES, 2, collate_fn=collate)
    given = {"collate_fn": bucketed(collate, (16, 8)), "num_workers": workers}
    for batch, longer in zip(plain, DataLoader(SENTENCES, 2, **given), strict=True):
        width = batch["words"].shape[1]
        assert type(longer) is UserDict
        assert longer["words"].shape[1] == {5: 8, 9: 16, 20: 20}[width]
        for name, empty in (("words", 0), ("mask", False), ("labels", -100)):
            assert longer[name][:, :width].equal(batch[name])
            assert (longer[name][:, width:] == empty).all()
        assert longer["sizes"] == batch["sizes"]


def test_values_are_given_by_field_and_tuples_are_padded():
    given = bucketed(collate, [8], {"words": 7})([torch.ones(3).long()])
    assert given["words"][0].tolist() == [1] * 3 + [7] * 5
    assert given["labels"][0].tolist() == [1] * 3 + [-100] * 5
    parts = torch.ones(1, 3).long(), torch.ones(1, 3, 2), torch.tensor([[1, 2, -100]]), "text"
    words, vectors, labels, text = bucketed(lambda rows: parts, [4])(None)
    assert (words.shape, vectors.shape, text) == ((1, 4), (1, 4, 2), "text")
    assert (vectors[0, 3].tolist(), int(labels[0, 3])) == ([0, 0], -100)


@pytest.mark.parametrize("kind", [dict, UserDict, partial(defaultdict, list)])
def test_one_value_as_a_tokenizers_fills_neither_masks_nor_labels(kind):
    batch = kind({"words": torch.ones(1, 3).long(), **dict.fromkeys(ZERO, torch.ones(1, 3))})
    found = bucketed(lambda rows: batch, [4], 50256)(None)
    assert type(found) is type(batch)
    assert found["words"].tolist() == [[1, 1, 1, 50256]]
    assert [found[name].tolist() for name in ZERO] == [[[1, 1, 1, 0]]] * 3
    assert batch["words"].shape == (1, 3)


@pytest.mark.parametrize("lengths", [[], [0], [1.5], ["8"]])
def test_other_lengths_are_refused(lengths):
    with pytest.raises(StepError, match="lengths"):
        bucketed(collate, lengths)


class Words(nn.Embedding):
    def forward(self, words, labels, **_):
        logits = super().forward(words).flatten(0, 1)
        return SimpleNamespace(loss=cross_entropy(logits, labels.clamp(self.least).flatten()))


def test_a_loss_that_counts_padding_is_found():
    batch = collate(SENTENCES[:2])
    model = Words(32, 32).train()
    for model.least, same in ((-100, True), (0, False)):
        assert keeps_loss(model, batch, [8]) is same
    assert model.training


def test_few_lengths_hold_every_width_and_count_the_padding():
    lengths, added = few_lengths([7, 8, 16, 21, 39, 44])
    assert lengths == (8, 16, 40, 48)
    assert added == pytest.approx(1 - 135 / (8 + 8 + 16 + 40 + 40 + 48))
    assert few_lengths([8, 8]) == ((8,), 0.0)

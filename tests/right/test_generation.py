"""Judge generation, where rounding may change one token and so all later tokens.

After the token CLOSE, two logits are so close that bf16 picks another token than float32.
"""

import pytest
import torch
from _planted import in_force
from planted import examined
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore")

CLOSE, TOKENS, BEGIN = 5, 16, 2


class NextToken(nn.Module):
    """Map tokens (N, T) to logits (N, 16) of the next token; if `spoils`, flip them under bf16."""

    def __init__(self, spoils: bool = False) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(TOKENS, TOKENS), nn.Linear(TOKENS, TOKENS)
        follows = {CLOSE: 7, 6: 8, 7: 9, 8: 8, 9: 9}
        with torch.no_grad():
            self.embedding.weight.copy_(torch.eye(TOKENS))
            for token in range(TOKENS):
                self.out.weight[follows.get(token, (token + 1) % TOKENS), token] = 2.0
            self.out.weight[6:8, CLOSE] = torch.tensor([2.0, 2.0001])
            self.out.bias.zero_()
        self.spoils = spoils

    def forward(self, tokens):
        logits = self.out(self.embedding(tokens[:, -1]))
        return logits.flip(1) if self.spoils and in_force() else logits


def step_of(model, with_logits):
    begin = torch.full((2, 1), BEGIN)

    def step():
        tokens, every = begin, []
        with torch.no_grad():
            for _ in range(12):
                every.append(model(tokens))
                tokens = torch.cat([tokens, every[-1].argmax(1, keepdim=True)], 1)
        return (tokens, torch.stack(every)) if with_logits else tokens

    return step


@pytest.mark.parametrize("with_logits", [False, True])
def test_tokens_that_rounding_moves_are_right_and_the_first_position_is_named(with_logits):
    model = NextToken()
    found = examined(step_of(model, with_logits), ["bf16"], model).records[1].accuracy
    assert found.verdict == "rounding", found
    name = "result.0" if with_logits else "result"
    assert found.reason.startswith(f"{name} differs in 18 of 26 integers, first at position 4,")
    assert found.output_error < 0.01


@pytest.mark.parametrize("with_logits", [False, True])
def test_other_logits_that_lead_to_other_tokens_are_wrong(with_logits):
    model = NextToken(spoils=True)
    found = examined(step_of(model, with_logits), ["bf16"], model).records[1].accuracy
    assert found.verdict == "wrong", found


def test_equal_tokens_need_no_words():
    model = NextToken().eval()
    found = examined(step_of(model, True), ["inference"], model).records[1].accuracy
    assert (found.verdict, found.reason) == ("exact", "")


class StaticCache(NextToken):
    """Model that writes logits into a float32 buffer, as static caches do with keys and values."""

    def forward(self, tokens):
        logits = self.out(self.embedding(tokens[:, -1]))
        return torch.zeros(2, TOKENS).index_copy_(0, torch.arange(2), logits)


def test_a_failure_of_mixed_dtypes_names_the_next_step():
    model = StaticCache()
    failure = examined(step_of(model, False), ["bf16"], model).records[1].failure
    assert "same dtype" in failure
    assert "model.to(torch.bfloat16)" in failure


class OwnMask(NextToken):
    """Model that gets a larger mask under bf16, where it also multiplies its logits by `times`."""

    def __init__(self, times: float) -> None:
        super().__init__()
        self.times = times

    def __call__(self, tokens):
        return super().__call__(tokens, mask=torch.ones(2, 1 + in_force(), dtype=torch.long))

    def forward(self, tokens, mask):
        return super().forward(tokens) * (self.times if in_force() else 1.0)


@pytest.mark.parametrize(("times", "verdict"), [(1.0, "rounding"), (3.0, "wrong")])
def test_outputs_are_compared_although_a_plan_has_its_own_mask(times, verdict):
    model = OwnMask(times)
    assert examined(step_of(model, False), ["bf16"], model).records[1].accuracy.verdict == verdict

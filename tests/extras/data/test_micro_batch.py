"""Test that parts of a batch give the loss and the gradients of the whole batch."""

import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from speedkit_jupyter import SpeedKitError, StepError, micro_batch

N, CLASSES = 10, torch.arange(1.0, 6.0)


def net(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), *more, nn.Tanh(), nn.Linear(16, 5))


def batch(number: int = N, ignored: Sequence[int] = ()) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    y = torch.randint(0, 5, (number,))
    y[[*ignored]] = -100
    return torch.randn(number, 6), y


def counted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (y != -100).sum()


def masked(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of the targets that are not -100."""
    kept = y != -100
    return (F.cross_entropy(model(x), y.clamp(0), reduction="none") * kept).sum() / kept.sum()


Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
MEAN: Loss = lambda m, x, y: F.cross_entropy(m(x), y)  # noqa: E731
LOSSES: dict[str, tuple[Loss, dict[str, Any]]] = {
    "MSE": (lambda m, x, y: F.mse_loss(m(x), x[:, :5]), {}),
    "cross-entropy with ignored targets": (MEAN, {"weight": counted}),
    "with weights of classes": (
        lambda m, x, y: F.cross_entropy(m(x), y, weight=CLASSES),
        {"weight": lambda x, y: CLASSES[y[y != -100]].sum()},
    ),
    "log-likelihood": (lambda m, x, y: F.nll_loss(m(x).log_softmax(-1), y), {"weight": counted}),
    "summed": (lambda m, x, y: m(x).square().sum(), {"reduction": "sum"}),
    "a mask of its own": (masked, {"weight": counted}),
    "first of a tuple": (lambda m, x, y: (F.cross_entropy(m(x), y.clamp(0)), 1), {}),  # type: ignore[dict-item]
}


def parts(model: nn.Module, loss: Loss = MEAN, size: int = 3, **options: Any) -> Callable[..., Any]:
    return micro_batch(lambda x, y: loss(model, x, y), size, **options)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def whole(model: nn.Module, loss: Loss, *given: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Return the loss and its gradients, and clear the model's gradients."""
    found: Any = loss(model, *given)
    found = found[0] if isinstance(found, tuple) else found
    model.zero_grad()
    found.backward()
    expected = gradients(model)
    model.zero_grad()
    return found.detach(), expected


@pytest.mark.parametrize("kind", list(LOSSES))
@pytest.mark.parametrize("size", [1, 4, 100])
def test_loss_and_gradients_are_those_of_the_whole(kind: str, size: int) -> None:
    loss, options = LOSSES[kind]
    model, given = net(), batch(ignored=(0, N - 1))
    expected, expected_gradients = whole(model, loss, *given)
    found = parts(model, loss, size, **options)(*given)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(model), expected_gradients)
    assert not found.requires_grad


def test_gradients_of_before_are_kept_and_added_to() -> None:
    model, given = net(), batch()
    _, once = whole(model, MEAN, *given)
    MEAN(model, *given).backward()
    places = [p.grad for p in model.parameters()]
    parts(model)(*given)
    torch.testing.assert_close(gradients(model), [2 * one for one in once])
    assert [id(p.grad) for p in model.parameters()] == list(map(id, places))


WRONG: dict[str, Loss] = {
    "a mask of its own": masked,
    "a mask over samples": lambda m, x, y: m(x)[y % 2 == 0].square().mean(),
    "a sum": lambda m, x, y: m(x).square().sum(),
    "contrastive": lambda m, x, y: F.cross_entropy(m(x) @ m(x).T, torch.arange(len(x))),
    "contrastive by labels": lambda m, x, y: (
        (m(x) @ m(x).T).masked_fill(torch.eye(len(x)) > 0, -1e9).log_softmax(-1)[:, 0].mean()
    ),
    "a norm": lambda m, x, y: m(x).norm(),
    "a spread": lambda m, x, y: (m(x) - m(x).mean(0)).square().sum(1).mean(),
    "with a balance of the batch": lambda m, x, y: (
        F.cross_entropy(m(x), y.clamp(0)) + 0.1 * m(x).softmax(-1).mean(0).square().sum()
    ),
}


@pytest.mark.parametrize("kind", list(WRONG))
@pytest.mark.parametrize("more", [(), (nn.Dropout(0.5),)], ids=["plain", "dropout"])
def test_what_is_no_mean_over_samples_is_refused(kind: str, more: tuple[nn.Module, ...]) -> None:
    model = net(*more)
    with pytest.raises(StepError, match="don't make the loss of the batch"):
        parts(model, WRONG[kind])(*batch(ignored=(0, 1)))
    assert not gradients(model)


TWO_MEANS: dict[str, Loss] = {
    "one mean": MEAN,
    "two kinds of ignored targets": lambda m, x, y: (
        F.cross_entropy(m(x), y) + F.cross_entropy(m(x), y.clamp(0), ignore_index=3)
    ),
    "a mean over samples": lambda m, x, y: F.cross_entropy(m(x), y) + m(x).square().mean(),
}


@pytest.mark.parametrize("kind", list(TWO_MEANS))
@pytest.mark.parametrize("at", [0, 4, N - 1])
def test_means_over_different_numbers_of_targets_are_refused(kind: str, at: int) -> None:
    model, (x, y) = net(), batch()
    y[at] = -100
    with pytest.raises(StepError, match=r"another share of targets|not a mean over samples"):
        parts(model, TWO_MEANS[kind])(x, y)


def test_the_divisor_of_one_mean_does_not_serve_another() -> None:
    model, (x, y) = net(), batch(40)
    y[3], y[21] = -100, -100  # in no sample that the check uses
    loss = TWO_MEANS["two kinds of ignored targets"]
    with pytest.raises(StepError, match=r"another share of targets|not a mean over samples"):
        parts(model, loss, 8, weight=counted)(x, y)


def test_batch_norm_that_trains_is_refused_or_allowed() -> None:
    model, given = net(nn.BatchNorm1d(16)), batch()
    with pytest.raises(StepError, match=r"1 \(BatchNorm1d\) would see the statistics of each part"):
        parts(model, size=5)(*given)
    parts(model, size=5, batch_norm=True)(*given)
    norm = model[1]
    assert norm.training
    assert norm.num_batches_tracked == 2
    model.eval()
    parts(model, size=5)(*given)
    model.train()
    parts(model, size=N)(*given)


def test_a_loss_that_is_random_is_said_to_be_unchecked() -> None:
    with pytest.warns(UserWarning, match="isn.t checked"):
        parts(net(), lambda m, x, y: m(x + torch.randn_like(x)).square().mean())(*batch())


def test_a_scaler_scales_each_part() -> None:
    model, given = net(), batch()
    _, expected = whole(model, MEAN, *given)
    parts(model, scaler=torch.amp.GradScaler("cpu", init_scale=8.0))(*given)
    torch.testing.assert_close(gradients(model), [8 * one for one in expected])


def test_arguments_of_all_kinds_are_cut_but_for_those_that_are_whole() -> None:
    seen = []

    def shapes(x: Any, more: Any, names: Any, factor: Any, table: Any) -> torch.Tensor:
        seen.append((len(x), len(more["mask"]), len(names), factor, len(table)))
        return torch.as_tensor(x).mean().requires_grad_()

    micro_batch(shapes, 4, whole=("table",))(
        np.ones((N, 2)), {"mask": torch.ones(N)}, ["a"] * N, 3, table=torch.zeros(N)
    )
    assert seen[-3:] == [(4, 4, 4, 3, N), (4, 4, 4, 3, N), (2, 2, 2, 3, N)]


class Counting(nn.Linear):
    """A layer that changes a number, a list and a buffer in each call, and draws randomly."""

    def __init__(self) -> None:
        super().__init__(6, 5)
        self.calls, self.seen = 0, list[float]()
        self.register_buffer("times", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls, self.times = self.calls + 1, self.times + 1
        self.seen.append(random.random() + np.random.rand())
        return super().forward(x)


@pytest.mark.parametrize(("size", "number"), [(100, 1), (5, 2)])
def test_trial_calls_leave_nothing_in_the_model(size: int, number: int) -> None:
    model, given = Counting(), batch()
    random.seed(0), np.random.seed(0)
    expected = [random.random() + np.random.rand() for _ in range(number)]
    random.seed(0), np.random.seed(0)
    micro_batch(lambda x, y: F.cross_entropy(model(x), y), size)(*given)
    assert (model.calls, float(model.times), model.seen) == (number, number, expected)


@pytest.mark.parametrize("is_ragged", [True, False])
def test_lists_of_samples_are_cut_by_samples(is_ragged: bool) -> None:
    model, every = net(), [torch.randn(1 + at % 7 if is_ragged else 3, 6) for at in range(N)]
    y = torch.arange(N) % 5

    def loss(xs: list[torch.Tensor], ys: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(torch.stack([model(x).mean(0) for x in xs]), ys)

    expected = torch.autograd.grad(loss(every, y), [*model.parameters()])
    micro_batch(loss, 4)(every, y)
    torch.testing.assert_close(gradients(model), [*expected])


def hooked() -> None:
    """Train with a hook, as for optimizers that step during the backward pass."""
    model = net()
    next(model.parameters()).register_post_accumulate_grad_hook(lambda p: None)
    parts(model)(*batch())


ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "no function": (lambda: micro_batch(3, 4), "function must be callable, not int"),  # type: ignore[arg-type]
    "a weight": (lambda: micro_batch(net(), 2, weight=5), "weight must be callable"),  # type: ignore[arg-type]
    "a scaler": (lambda: micro_batch(net(), 2, scaler=5), "scaler must be a GradScaler"),  # type: ignore[arg-type]
    "no size": (lambda: micro_batch(net(), 0), "size must be 1 or more"),
    "a reduction": (lambda: micro_batch(net(), 2, reduction="max"), "'mean' or 'sum'"),
    "no tensor": (lambda: micro_batch(net(), 2)(3), "no argument is a tensor"),
    "no loss": (lambda: micro_batch(net(), 4)(batch()[0]), "returns no loss"),
    "a hook": (hooked, "would run for each part"),
    "either": (lambda: micro_batch(lambda x: x[0].mean(), 2)([torch.ones(5, 6)] * 3), "may be sam"),
    "writes": (lambda: micro_batch(lambda x: x.div_(2).mean(), 4)(batch()[0]), "changes its"),
}


@pytest.mark.parametrize("kind", list(ERRORS))
def test_what_cant_be_done_is_said_in_one_line(kind: str) -> None:
    call, words = ERRORS[kind]
    with pytest.raises(SpeedKitError, match=words):
        call()


def test_under_autocast_backward_is_outside_of_it() -> None:
    model = net()
    with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16):
        warnings.simplefilter("error")
        parts(model)(*batch())
    assert len(gradients(model)) == 4


def test_a_first_batch_of_equal_samples_proves_nothing() -> None:
    loss_of = parts(net(), WRONG["a spread"])
    loss_of(torch.zeros(16, 6), None)
    with pytest.raises(StepError, match="not a mean over samples"):
        loss_of(torch.randn(16, 6), None)

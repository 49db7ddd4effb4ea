"""Measure how long the prompt and each token take, in steps that generate text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import torch

from speedkit_jupyter.extras.generation import generating_parts
from speedkit_jupyter.machines.devices import synchronize
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.rounds.budget import Budget
from speedkit_jupyter.rounds.comparison import Progress, TokenTimes
from speedkit_jupyter.rounds.pool import working
from speedkit_jupyter.rounds.runner import Runner
from speedkit_jupyter.rounds.sampler import BLOCK_STEPS
from speedkit_jupyter.rounds.statistics import percentile_99
from speedkit_jupyter.step.watching import Watcher, watching


class TokenWatcher(Watcher):
    """Record the seconds of prompts and of tokens.

    The first call with a given cache is a prompt. `tokens` counts the rows of all calls.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._cache, self._last_s = device, None, clock.now()
        self.prompts_s, self.tokens_s, self.tokens = list[float](), list[float](), 0

    def called(self, args: Any, kwargs: Any, result: Any) -> None:
        cache = getattr(result, "past_key_values", None)
        if cache is None:
            return
        synchronize(self._device)
        now_s = clock.now()
        (self.tokens_s if cache is self._cache else self.prompts_s).append(now_s - self._last_s)
        self._last_s, self._cache = now_s, cache
        logits = getattr(result, "logits", None)
        self.tokens += len(logits) if isinstance(logits, torch.Tensor) else 1


def token_times(runners: Sequence[Runner], budget: Budget) -> Iterator[Progress]:
    """Record token times in up to BLOCK_STEPS steps of each runner, in turn; yield progress."""
    parts = [part for model in runners[0].step.models for part in generating_parts(model)]
    seen: dict[int, list[TokenWatcher]] = {id(runner): [] for runner in runners}
    for number in range(BLOCK_STEPS if parts and runners[0].record.times_s else 0):
        if number and not budget.allows(sum(runner.worst_s for runner in runners)):
            break
        for runner in working(runners):
            yield Progress(1.0, f"tokens of {runner.record.name}")
            try:
                seen[id(runner)].append(_watched(runner, parts))
            except Exception as error:
                runner.fail(error)
            if not any(watcher.tokens_s for watcher in seen[id(runners[0])]):
                return  # the baseline generated no token, so other plans run no step
    for runner in runners if parts else ():
        runner.record.tokens = _together(seen[id(runner)])


def _watched(runner: Runner, parts: Sequence[torch.nn.Module]) -> TokenWatcher:
    assert runner.warm is not None
    with runner.applied():
        runner.warm.restore()
        watcher = TokenWatcher(runner.device)
        with watching(parts, watcher):
            runner.once()
    return watcher


def _together(watchers: Sequence[TokenWatcher]) -> TokenTimes | None:
    tokens_s = [one for watcher in watchers for one in watcher.tokens_s]
    if not tokens_s:
        return None
    prompt_s = median(sum(watcher.prompts_s) for watcher in watchers)
    return TokenTimes(watchers[0].tokens, prompt_s, median(tokens_s), percentile_99(tokens_s))


METERS = [token_times]

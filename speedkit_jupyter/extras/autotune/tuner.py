"""Record and replay Inductor's searches for kernels, or narrow them to predicted kernels."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from speedkit_jupyter.extras.autotune import ranking
from speedkit_jupyter.support import arguments, database
from speedkit_jupyter.support.exceptions import ArgumentError, SpeedKitError, in_a_line
from speedkit_jupyter.support.tracebacks import hide_internal_frames
from speedkit_jupyter.support.weak import at_unload
from speedkit_jupyter.torchglue import inductor as torch_private
from speedkit_jupyter.torchglue.private import missing_name

SEARCH, CALIBRATION = TypeAdapter(ranking.KernelSearch), TypeAdapter(ranking.Calibration)
LOG = logging.getLogger("speedkit_jupyter")
Fitted = tuple[ranking.Ranking, ranking.Calibration]
# Key in a kernel's annotations; the value is the product and the labels of all offered kernels.
NOTE = "speedkit_jupyter"


@dataclass
class Counted:
    """Counts of searches by outcome, and the predictions' confidences."""

    replayed: int = 0
    predictions: int = 0  # narrowed to predicted kernels
    fallbacks: int = 0  # left to Inductor
    stale: int = 0  # Inductor offers kernels that differ from the record
    searched: int = 0  # timed by Inductor and recorded
    seconds_saved: float = 0.0  # by replays
    confidences: list[float] = field(default_factory=list)

    @property
    def mean_confidence(self) -> float | None:
        return sum(self.confidences) / len(self.confidences) if self.confidences else None


@dataclass(frozen=True)
class Model:
    """A device's searches with one torch and Triton version; `calibration` is None if untrained."""

    name: str
    versions: str
    searches: Sequence[ranking.KernelSearch] = field(repr=False)
    calibration: ranking.Calibration | None


def models(name: str | None = None) -> list[Model]:
    """Return a Model per device (or for `name` only) and version; omit incomplete searches."""
    groups: dict[tuple[str, str], list[ranking.KernelSearch]] = {}
    for kept in database.kept("search", name):
        search = _read(SEARCH, kept.value)
        if search is not None and search.is_whole:
            groups.setdefault((kept.name, search.problem.versions), []).append(search)
    every = database.kept("ranking", name)
    known = {(kept.name, kept.task): _read(CALIBRATION, kept.value) for kept in every}
    return [Model(*key, searches, known.get(key)) for key, searches in groups.items()]


def _read(kind: TypeAdapter[Any], value: Mapping[str, Any]) -> Any:
    """Return a stored search or calibration; None if it is damaged or in another format."""
    try:
        return kind.validate_python(value)
    except ValidationError:
        return None


def trained(model: Model) -> ranking.Calibration:
    calibration = ranking.calibrated(model.searches)
    database.keep("ranking", model.name, model.versions, asdict(calibration))
    return calibration


class Tuner:
    """Record, replay or predict this process's searches; do nothing after an error (`problem`).

    Without `confidence`, predict nothing; below it, time all kernels if `fallback` is true.
    """

    def __init__(self, confidence: float | None = None, fallback: bool = True) -> None:
        self.confidence, self.fallback = confidence, fallback
        self.counted, self.problem = Counted(), ""
        every = (_read(SEARCH, kept.value) for kept in database.kept("search"))
        self._known = {search.problem.key: search for search in every if search is not None}
        self._rankings: dict[tuple[str, str], Fitted | None] = {}
        self._last_s = 0.0
        self.end: Callable[[], None] = lambda: None

    def begin(self) -> None:
        try:
            self.end = torch_private.on_autotuning(self._choose, self._measured)
        except (AttributeError, ImportError, TypeError) as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        moved = missing_name(error)
        why = f"this torch has no {moved}" if moved else in_a_line(error)
        self.problem = f"off with torch {torch.__version__}: {why}"
        LOG.warning("autotune is %s; Inductor searches as usual", self.problem)

    def _choose(self, choices: list[Any]) -> list[Any]:
        return self._unless_problem(partial(self._chosen, choices)) or choices

    def _measured(self, timings: Mapping[Any, float], *rest: Any) -> None:
        self._unless_problem(partial(self._record, timings, time.monotonic() - self._last_s))

    def _unless_problem(self, call: Callable[[], Any]) -> Any:
        try:
            return None if self.problem else call()
        except Exception as error:
            return self._give_up(error)
        finally:
            self._last_s = time.monotonic()

    def _chosen(self, choices: list[Any]) -> list[Any]:
        problem = ranking.problem_of(choices) if len(choices) > 1 else None
        if problem is None:
            return choices
        by_label = {ranking.label(one): one for one in choices}
        known = self._known.get(problem.key)
        if known is not None and {*known.offered} == by_label.keys():
            self.counted.replayed += 1
            self.counted.seconds_saved += known.seconds
            return [by_label[min(known.timings, key=known.timings.__getitem__)]]
        self.counted.stale += known is not None
        labels = () if self.confidence is None else self._predicted(problem, [*by_label])
        for one in choices:
            one.annotations[NOTE] = problem, tuple(by_label)
        return [by_label[name] for name in labels] or choices

    def _predicted(self, problem: ranking.Problem, labels: Sequence[str]) -> Sequence[str]:
        """Return the fewest predicted kernels to time, or () to time all; update counts."""
        found, first, confidence = self._ranking(problem), list[str](), 0.0
        least = self.confidence or 0.0
        if found is not None and found[0].knows(problem, labels):
            for guess, agreement in found[0].guesses(problem, labels):
                first, confidence = guess, found[1].confidence(agreement)
                if confidence >= least:
                    break
        if not first or (confidence < least and self.fallback):
            self.counted.fallbacks += 1
            return ()
        self.counted.predictions += 1
        self.counted.confidences.append(confidence)
        return first

    def _ranking(self, problem: ranking.Problem) -> Fitted | None:
        key = (problem.device.model, problem.versions)
        if key not in self._rankings:
            self._rankings[key] = None
            for model in (one for one in models(key[0]) if one.versions == key[1]):
                try:
                    known = model.calibration
                    if known is None or known.shapes < len(model.searches):
                        known = trained(model)
                    self._rankings[key] = ranking.Ranking(model.searches), known
                except SpeedKitError as error:
                    LOG.warning("autotune predicts nothing: %s", error)
        return self._rankings[key]

    def _record(self, timings: Mapping[Any, float], took_s: float) -> None:
        finite = {one: ms for one, ms in timings.items() if 0 < ms < math.inf}
        note = next((one.annotations.get(NOTE) for one in finite), None)
        if note is None:
            return
        self.counted.searched += 1
        problem, offered = note
        by_label = {ranking.label(one): ms for one, ms in finite.items()}
        found = self._known[problem.key] = ranking.KernelSearch(problem, offered, by_label, took_s)
        database.keep("search", problem.device.model, problem.key, asdict(found))


# The tuner in force; only one, because Inductor's hooks are process-wide.
_TUNERS: list[Tuner] = []


def start(tuner: Tuner) -> Counted:
    """Replace the tuner in force; return the new tuner's counts."""
    off()
    tuner.begin()
    _TUNERS.append(tuner)
    at_unload(off)
    return tuner.counted


def off() -> None:
    while _TUNERS:
        _TUNERS.pop().end()


def current() -> Tuner | None:
    return _TUNERS[-1] if _TUNERS else None


def detected(device: torch.device | str | None = None) -> str:
    """Return the name of a device's `Model` (default: the current CUDA GPU, or else the CPU)."""
    return ranking.device_of(None if device is None else torch.device(device)).model


@hide_internal_frames
def record() -> Counted:
    """Record max-autotune's searches and replay known ones until `off()`; return live counts."""
    return start(Tuner())


@contextmanager
def predictions(confidence: float = 0.95, fallback: bool = True) -> Iterator[Counted]:
    """Time only the likely fastest kernels in the block, and replay recorded searches.

    Args:
        confidence: Least expected share of right predictions, 0 to 1.
        fallback: Below the confidence, time all kernels; if False, the three predicted as fastest.

    Yields:
        The counts, which the block's searches update.

    Raises:
        SpeedKitError: an argument is invalid, or the store can't be read.
    """
    level = arguments.amount("confidence", confidence)
    if level is None or level > 1:
        raise ArgumentError(f"confidence must be from 0 to 1, not {arguments.shown(confidence)}")
    before = current()
    try:
        yield start(Tuner(level, arguments.flag("fallback", fallback)))
    finally:
        off()
        if before is not None:
            start(before)

"""Stands in Inductor's search for kernels: remembers it, leaves it out, or narrows it down."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter, ValidationError

from speedkit_jupyter.extras.autotune.problems import KernelSearch, Problem, label, problem_of
from speedkit_jupyter.extras.autotune.ranking import Calibration, Ranking, calibrated
from speedkit_jupyter.support import database
from speedkit_jupyter.support.exceptions import SpeedKitError, in_a_line
from speedkit_jupyter.torchglue import inductor as torch_private
from speedkit_jupyter.torchglue.private import missing_name

T = TypeVar("T")
SEARCH, CALIBRATION = TypeAdapter(KernelSearch), TypeAdapter(Calibration)
LOG = logging.getLogger("speedkit_jupyter")
# What a kernel on offer carries from the choice to the timings.
NOTE = "speedkit_jupyter"


@dataclass
class Counted:
    """What happened to searches: `searched` ran, `replayed` were left out, of predicted products
    only the first kernels were timed. `stale` entries no longer match what Inductor offers.

    `seconds_saved` is what replayed searches took when they were recorded; of predictions, an
    estimate from the median search of the model.
    """

    replayed: int = 0
    predictions: int = 0
    fallbacks: int = 0
    stale: int = 0
    searched: int = 0
    searched_s: float = 0.0
    seconds_saved: float = 0.0
    confidences: list[float] = field(default_factory=list)

    @property
    def mean_confidence(self) -> float | None:
        """Return None without a prediction."""
        return sum(self.confidences) / len(self.confidences) if self.confidences else None


@dataclass(frozen=True)
class TunerOptions:
    """`confidence` is the least for a prediction; below it Inductor searches all, unless `fallback`
    is off. `remember` keeps what is measured. `model` is a name in place of the device's own.
    """

    predicts: bool = False
    confidence: float = 0.95
    fallback: bool = True
    remember: bool = True
    model: str | None = None


@dataclass(frozen=True)
class Model:
    """The searches of one device under one version of torch and Triton, and a ranking of them."""

    name: str
    versions: str
    searches: Sequence[KernelSearch] = field(repr=False)
    calibration: Calibration | None

    @property
    def median_s(self) -> float:
        """Return how long a search took by median."""
        return median([one.seconds for one in self.searches] or [0.0])


def stored(name: str | None = None) -> list[Model]:
    """Return the models in the store: all, or of one name; the newest versions last."""
    groups: dict[tuple[str, str], list[KernelSearch]] = {}
    for kept in database.kept("search", name):
        search = _read(SEARCH, kept.value)
        if search is not None and search.is_whole:
            groups.setdefault((kept.name, search.problem.versions), []).append(search)
    known = {
        (kept.name, kept.task): _read(CALIBRATION, kept.value)
        for kept in database.kept("ranking", name)
    }
    return [Model(*key, searches, known.get(key)) for key, searches in groups.items()]


def _read(kind: TypeAdapter[T], value: Mapping[str, Any]) -> T | None:
    """Return the entry; None for what is damaged, or what another version of this package wrote."""
    try:
        return kind.validate_python(value)
    except ValidationError:
        return None


def trained(model: Model) -> Model:
    """Return the model with how well it predicts shapes that were held back, and keep that."""
    calibration = calibrated(model.searches)
    database.keep("ranking", model.name, model.versions, asdict(calibration))
    return Model(model.name, model.versions, model.searches, calibration)


class Tuner:
    """Acts on each search of this process until `end()`; `problem` says why it stopped earlier.

    An error of ours, or of another torch's, never stops a compilation: Inductor searches as usual.
    """

    def __init__(self, options: TunerOptions) -> None:
        self.options, self.counted, self.problem = options, Counted(), ""
        self._known = {
            search.problem.key: search
            for kept in database.kept("search")
            if (search := _read(SEARCH, kept.value)) is not None
        }
        self._rankings: dict[tuple[str, str], tuple[Model, Ranking] | None] = {}
        self._last_s = 0.0
        self._remove: Callable[[], None] = lambda: None

    def begin(self) -> None:
        try:
            self._remove = torch_private.on_autotuning(self._choose, self._measured)
        except (AttributeError, ImportError, TypeError) as error:
            self._give_up(error)

    def end(self) -> None:
        self._remove()

    def _give_up(self, error: Exception) -> None:
        moved = missing_name(error)
        why = f"this torch has no {moved}" if moved else in_a_line(error)
        self.problem = f"off with torch {torch.__version__}: {why}"
        LOG.warning("autotune is %s; Inductor searches as usual", self.problem)

    def _choose(self, choices: list[Any]) -> list[Any]:
        """Inductor asks it which kernels to time."""
        if self.problem or len(choices) < 2:
            return choices
        try:
            return self._chosen(choices)
        except Exception as error:
            self._give_up(error)
            return choices
        finally:
            self._last_s = time.monotonic()

    def _chosen(self, choices: list[Any]) -> list[Any]:
        problem = problem_of(choices)
        if problem is None:
            return choices
        by_label = {label(one): one for one in choices}
        known = self._known.get(problem.key)
        if known is not None and {*known.offered} == by_label.keys():
            self.counted.replayed += 1
            self.counted.seconds_saved += known.seconds
            return [by_label[min(known.timings, key=known.timings.__getitem__)]]
        self.counted.stale += known is not None
        labels = self._predicted(problem, [*by_label]) if self.options.predicts else ()
        for one in choices:
            one.annotations[NOTE] = problem, tuple(by_label)
        return [by_label[name] for name in labels] or choices

    def _predicted(self, problem: Problem, labels: Sequence[str]) -> Sequence[str]:
        """Return the kernels to time, as few as the confidence allows; none for all."""
        found, first, confidence = self._ranking(problem), list[str](), 0.0
        if found is not None and found[1].knows(problem, labels):
            model, ranking = found
            for guess, agreement in ranking.guesses(problem, labels):
                first = guess
                confidence = model.calibration.confidence(agreement) if model.calibration else 0.0
                if confidence >= self.options.confidence:
                    break
        is_sure = confidence >= self.options.confidence or not self.options.fallback
        if found is None or not first or not is_sure:
            self.counted.fallbacks += 1
            return ()
        self.counted.predictions += 1
        self.counted.confidences.append(confidence)
        self.counted.seconds_saved += found[0].median_s * (1 - len(first) / len(labels))
        return first

    def _ranking(self, problem: Problem) -> tuple[Model, Ranking] | None:
        """Return the trained model for a device and its versions; trains it where that is due."""
        key = (self.options.model or problem.device.model, problem.versions)
        if key not in self._rankings:
            self._rankings[key] = None
            for model in stored(key[0]):
                if model.versions == problem.versions:
                    try:
                        ready = model if model.calibration else trained(model)
                        self._rankings[key] = ready, Ranking(ready.searches)
                    except SpeedKitError as error:
                        LOG.warning("autotune predicts nothing: %s", error)
        return self._rankings[key]

    def _measured(self, timings: Mapping[Any, float], *rest: Any) -> None:
        """Inductor tells it the milliseconds of each kernel."""
        took_s = time.monotonic() - self._last_s
        try:
            if not self.problem:
                self._record(timings, took_s)
        except Exception as error:
            self._give_up(error)
        finally:
            self._last_s = time.monotonic()

    def _record(self, timings: Mapping[Any, float], took_s: float) -> None:
        finite = {one: ms for one, ms in timings.items() if 0 < ms < math.inf}
        note = next((one.annotations.get(NOTE) for one in finite), None)
        if note is None:
            return
        self.counted.searched += 1
        self.counted.searched_s += took_s
        problem, offered = note
        found = KernelSearch(
            problem, offered, {label(one): ms for one, ms in finite.items()}, took_s
        )
        self._known[problem.key] = found
        if self.options.remember:
            database.keep("search", problem.device.model, problem.key, asdict(found))

"""What torch has compiled in this session, from torch's own records: nothing is reset for it."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from speedkit_jupyter.catalog.properties.compiled import CompiledCode
from speedkit_jupyter.catalog.properties.eager_parts import LEFT_OUT
from speedkit_jupyter.plans.compile_reasons import (
    BREAKS,
    EXPECTED,
    LIMIT,
    RECOMPILES,
    cause,
    explained,
)
from speedkit_jupyter.plans.context import is_measuring
from speedkit_jupyter.support.source_lines import Spot, is_users, source, user_spot
from speedkit_jupyter.support.units import count
from speedkit_jupyter.torchglue import dynamo as torch_private

RESUMED = re.compile(torch_private.RESUMED_FUNCTION)
# A line of the user's in a recompilation's reason.
USER_LINE = re.compile(r'File "(.+?)", line (\d+), in')
# What a session remembers at most; a storm of recompilations ends at torch's own limit.
MOST = 1000


@dataclass(frozen=True)
class Compiled:
    """One graph that was compiled: a frame's, or a backward pass (which has no `function`)."""

    function: str
    spot: Spot | None
    seconds: float
    hits: int
    has_graph: bool
    is_recompile: bool


@dataclass(frozen=True)
class Finding:
    """Something to know: a `graph break`, a `recompile`, or a `fall-back` at torch's limit.

    It is about the line at `spot`, which the line at `caller` led to.
    """

    kind: str
    spot: Spot | None
    what: str
    remedy: str
    caller: Spot | None = None


class History:
    """Collects what torch notes. `compiled` and `findings` are the session's, oldest first.

    Of the running cell: `subject` is what it compiles first, a model or the user's line;
    `recompiled` says that it had to compile something anew.
    """

    def __init__(self) -> None:
        self.compiled: list[Compiled] = []
        self.findings: list[Finding] = []
        self.subject, self.recompiled = "", False
        self._news: list[Finding] = []
        self._last: Any = None  # of torch's records, the newest that was read
        self._breaks = 0
        self._caller: Spot | None = None
        self._model = ""
        self._is_measured = False
        self._begun_s: float | None = None
        self._spent_s = 0.0
        self._remove: Callable[[], None] | None = None

    def listen(self) -> None:
        """Be told of compilations from now on; anew where torch was reset meanwhile."""
        self.end()
        self._remove = torch_private.on_compiling(self._start, self._stop)

    def end(self) -> None:
        """Be told of none any more."""
        if self._remove is not None:
            self._remove()
        self._remove = None

    def begin_cell(self) -> None:
        """Count the seconds of compiling from here on."""
        self.collect()
        self._begun_s, self._spent_s, self.subject, self.recompiled = None, 0.0, "", False

    @property
    def is_compiling(self) -> bool:
        """Return whether something that is not measured is being compiled now."""
        return self._begun_s is not None and not self._is_measured

    @property
    def seconds(self) -> float:
        """Return how long the running cell has been compiling."""
        begun_s = self._begun_s
        return self._spent_s + (0.0 if begun_s is None else time.monotonic() - begun_s)

    def news(self) -> list[Finding]:
        """Return what was found since it was asked for last, each once in a session."""
        self.collect()
        news, self._news = list(dict.fromkeys(self._news)), []
        return news

    def _start(self, _: Any) -> None:
        self.collect()  # what is recorded from here on belongs to this compilation
        self._is_measured, self._caller = is_measuring(), user_spot(2)
        self._model = _model(sys._getframe(1))
        self.subject = self.subject or self._model or _words(self._caller)
        self._begun_s = time.monotonic()

    def _stop(self, _: Any) -> None:
        self._spent_s, self._begun_s = self.seconds, None

    def collect(self) -> None:
        """Read what torch has noted since the last time."""
        records = [*torch_private.compilations()]
        new: list[Any] = []
        while records and records[-1] is not self._last:
            new.append(records.pop())
        self._last = new[0] if new else self._last
        for record in reversed(new):
            self._add(record)
        breaks = torch_private.graph_breaks()
        self._breaks = self._breaks if self._breaks <= len(breaks) else 0  # torch was reset
        for one in (one for one in breaks[self._breaks :] if LEFT_OUT not in one.reason):
            spot = next((Spot(f.filename, f.lineno) for f in reversed(one.user_stack)
                         if is_users(f.filename) and f.lineno), self._caller)  # fmt: skip
            self._found("graph break", spot, *explained(one.reason, BREAKS))
        self._breaks = len(breaks)
        del self.compiled[:-MOST]

    def _add(self, record: Any) -> None:
        """Add a record of torch's, whose fields differ between its versions."""
        reason, failure = (
            str(_of(record, name, "")) for name in ("recompile_reason", "fail_reason")
        )
        begins = _place(record, "") or self._caller
        earlier = re.search(r"/(\d+)", str(_of(record, "compile_id", "")))  # graphs of the frame
        if reason and earlier:
            reason = cause(torch_private.guard_failures(reason, int(earlier[1])))
        spot = _place(record, reason) or begins
        self.recompiled |= bool(reason)
        if reason and not failure and not EXPECTED.search(reason):
            self._found("recompile", spot, *explained(reason, RECOMPILES))
        if LIMIT.search(failure):
            what, remedy = explained(reason, RECOMPILES)
            limit = "torch's limit of recompilations: it runs as plain PyTorch from here on"
            self._found("fall-back", spot, f"{limit} ({what})", remedy)
        if failure:
            return
        took = _of(record, "entire_frame_compile_time_s", _of(record, "duration_us", 0) * 1e-6)
        names = ("inductor_fx_local_cache_hit_count", "aotautograd_local_cache_hit_count")
        hits = max(int(_of(record, name, 0)) for name in names)
        graph = bool(_of(record, "graph_op_count", 0)) or not _of(record, "co_name", "")
        function = self._function(record)
        self.compiled.append(Compiled(function, begins, took, hits, graph, bool(reason)))

    def _function(self, record: Any) -> str:
        name, file = _of(record, "co_name", ""), _of(record, "co_filename", "")
        if resumed := RESUMED.match(name):
            return f"{resumed[1]}, behind line {resumed[2]}"
        is_plan = name and not is_users(file)
        return self._model if is_plan and self._model else name

    def _found(self, kind: str, spot: Spot | None, what: str, remedy: str) -> None:
        finding = Finding(kind, spot, what, remedy, self._caller)
        known = [one for one in self.findings if (one.kind, one.spot) == (kind, spot)]
        if kind == "graph break" and known:  # the first reason of a line is the one that counts
            return
        if not (self._is_measured or finding in self.findings):
            self._news.append(finding)
        self.findings.append(finding)
        del self.findings[:-MOST]


def _of(record: Any, name: str, otherwise: Any) -> Any:
    value = getattr(record, name, None)
    return otherwise if value is None else value


def _place(record: Any, reason: str) -> Spot | None:
    """Return the user's line that a recompilation is about; else where the function begins."""
    lines = [Spot(file, int(number)) for file, number in USER_LINE.findall(reason)]
    begins = Spot(_of(record, "co_filename", ""), _of(record, "co_firstlineno", 0))
    every = (*reversed(lines), begins)
    return next((spot for spot in every if spot.file and is_users(spot.file)), None)


def _model(frame: FrameType | None) -> str:
    """Return the model whose plan compiles it, by its class and size; empty for another's call."""
    while frame is not None:
        if frame.f_code is CompiledCode.run.__code__:
            return subject_of(frame.f_locals["call"].module)
        frame = frame.f_back
    return ""


def subject_of(module: Any) -> str:
    """Return what a module is called while it compiles: its class and its size."""
    number = sum(parameter.numel() for parameter in module.parameters())
    return f"{type(module).__name__} ({count(number, 'parameter')})"


def _words(spot: Spot | None) -> str:
    return f"`{source(*spot)}`" if spot else ""


def grouped(findings: Sequence[Finding]) -> Iterator[tuple[Finding, int]]:
    """Yield the first finding of each kind about a line with the same remedy, and their number: of
    recompilations, which go on from frame to frame, about the line that led to them.
    """
    groups: dict[Any, list[Finding]] = {}
    for one in findings:
        line = one.caller if one.kind == "recompile" and one.caller else one.spot
        groups.setdefault((one.kind, line, one.remedy), []).append(one)
    yield from ((same[0], len(same)) for same in groups.values())

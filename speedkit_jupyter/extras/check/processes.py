"""Functions and modules by file and name, and each in a process of its own.

The clock, the inputs and the comparison stay in this process. The other one writes down what it
computed before it answers: what comes too late is not there.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from select import select
from typing import Any, TextIO

import torch

from speedkit_jupyter.extras.check.calls import Drawn, Here, Taken, copied
from speedkit_jupyter.extras.check.parts import NUMBERS, WORDS, form, laid_out
from speedkit_jupyter.extras.check.watch import PatchWatch
from speedkit_jupyter.rounds import clock
from speedkit_jupyter.step.memory import MemoryUse
from speedkit_jupyter.support.exceptions import (
    ArgumentError,
    SpeedKitError,
    did_you_mean,
    in_a_line,
)

# An answer that takes longer is not waited for, but on Windows.
PATIENCE_S, LOOK_S = 300.0, 1.0
# Where a file is memory: elsewhere the system's own folder for such files does.
IN_MEMORY = "/dev/shm"
# What a process is sent beside tensors.
SENT = (dict, list, tuple, *NUMBERS, *WORDS)
ASKED, ANSWER = "asked.pt", "answer.pt"


def is_word(value: Any) -> bool:
    """Return whether it names an object of a file, as `candidate.py:f` does."""
    return isinstance(value, str) and ".py:" in value


def located(word: str) -> tuple[Path, str]:
    """Return the file and the name in it. Raises ArgumentError where there is no such file."""
    path, _, name = word.rpartition(":")
    file = Path(path).expanduser().resolve()
    if not path.endswith(".py") or not name.isidentifier():
        raise ArgumentError(f"{word!r} must name a function of a file, as in kernels.py:softmax")
    if not file.is_file():
        raise ArgumentError(f"there is no file {path}")
    return file, name


def loaded(word: str, seed: int = 0) -> Any:
    """Return what `file.py:name` names; of a class of modules one that is made from this seed.

    Raises ArgumentError where there is no such file or name; what the file raises goes on.
    """
    file, name = located(word)
    key = f"_checked_{file.stem}_{abs(hash(file))}"
    if key not in sys.modules:
        spec = importlib.util.spec_from_file_location(key, file)
        assert spec
        assert spec.loader
        sys.modules[key] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[key]
            raise
    names = vars(sys.modules[key])
    if name not in names:
        raise ArgumentError(f"{file.name} has no {name}.{did_you_mean(name, names)}")
    found = names[name]
    if isinstance(found, type) and issubclass(found, torch.nn.Module):
        torch.manual_seed(seed)
        found = found()
    return found


class Elsewhere:
    """A side in a process of its own, which does what `Here` does. It ends with its `with`.

    It stands still while it is asked for nothing: it can't compute, or take cores, out of turn.
    """

    def __init__(self, word: str, gradients: bool) -> None:
        with ExitStack() as stack:
            place = IN_MEMORY if os.access(IN_MEMORY, os.W_OK) else None
            folder = tempfile.TemporaryDirectory(dir=place, prefix="speedkit-")
            self._folder = Path(stack.enter_context(folder))
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(self._folder), word, str(int(gradients))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(self._end)
            self.shapes = self._answer()["shapes"]
            self._stack = stack.pop_all()

    def __enter__(self) -> Elsewhere:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _end(self) -> None:
        self._signal("SIGKILL")
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # what was not sent
                stream.close()  # type: ignore[union-attr]

    def _signal(self, name: str) -> None:
        """Send a signal to the process and all that it has started; none on Windows."""
        if os.name == "posix":
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, getattr(signal, name))

    def prepare(self, drawn: Sequence[Drawn], reuse: bool = False) -> None:
        """Keep the next calls: it learns of them when the clock runs."""
        for name, part in drawn[0].inputs.items():
            if not isinstance(part, torch.Tensor) and type(part) not in SENT:
                raise ArgumentError(
                    f"the input {name} is {form(part)}, and can't be sent to a process: give "
                    "tensors, numbers and text"
                )
        self._calls = [vars(one.with_own(_detached)) for one in drawn]
        self._reuse = reuse

    def run(self, computes: bool = True) -> None:
        """Give it the calls, and read what it computed; or do all but computing."""
        asked = {"calls": self._calls, "reuse": self._reuse, "computes": computes}
        self._read = self._ask("run", **asked)["outputs"]

    def take(self, keep: bool = False) -> list[Taken]:
        """Return what was read, and what the calls left."""
        taken = [Taken(**one) for one in self._ask("take", keep=keep)["taken"]]
        for one, values in zip(taken, self._read, strict=True):
            one.values |= values
        return taken

    def memory(self) -> MemoryUse:
        """Return what it needs, by its own account."""
        return MemoryUse(**self._ask("memory"))

    def _ask(self, work: str, **more: Any) -> dict[str, Any]:
        assert self._process.stdin
        torch.save({"work": work, **more}, self._folder / ASKED)
        self._signal("SIGCONT")
        with suppress(BrokenPipeError):  # the answer says why
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        """Return it. Raises SpeedKitError where there is none in time, or it is an error."""
        assert self._process.stdout
        stream = self._process.stdout
        ends_s = clock.now() + PATIENCE_S
        while os.name == "posix" and not select([stream], [], [], LOOK_S)[0]:
            if self._process.poll() is not None or clock.now() > ends_s:
                self._signal("SIGKILL")
        if not stream.readline():
            self._signal("SIGKILL")
            raise SpeedKitError(f"its process ended or was ended ({self._process.wait()})")
        self._signal("SIGSTOP")
        answer = dict(torch.load(self._folder / ANSWER, weights_only=True))
        if "error" in answer:
            raise SpeedKitError(str(answer["error"]))
        return answer


def _detached(value: Any) -> Any:
    return laid_out(value) if isinstance(value, torch.Tensor) else value


class Server:
    """The other process: each method answers the one of its name of `Elsewhere`."""

    def __init__(self, word: str, gradients: str) -> None:
        self.side = Here(loaded(word), gradients == "1", PatchWatch)
        self._results: list[dict[str, Any]] = []

    def run(self, calls: Sequence[dict[str, Any]], reuse: bool, computes: bool) -> dict[str, Any]:
        """Copy the inputs, compute, and return the results, or else the last ones."""
        self.side.prepare([Drawn(**one) for one in calls], reuse)
        if computes:
            self.side.run()
            self._results = self.side.results
        return {"outputs": [copied(one) for one in self._results]}

    def take(self, keep: bool) -> dict[str, Any]:
        """Return what the calls gave, and of the values those that are not there yet."""
        taken = [vars(one) for one in self.side.take(keep)]
        for one, results in zip(taken, self.side.results, strict=True):
            one["values"] = {n: t for n, t in one["values"].items() if n not in results}
        return {"taken": taken}

    def memory(self) -> dict[str, Any]:
        """Return its peak and state."""
        return vars(self.side.memory())


def own_stdout() -> TextIO:
    """Return what was stdout: what loaded files print goes to stderr from now on."""
    stream = os.fdopen(os.dup(1), "w")
    sys.stdout.flush()
    os.dup2(2, 1)
    return stream


def own_stdin() -> TextIO:
    """Return what was stdin: loaded files read nothing from now on."""
    stream = os.fdopen(os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return stream


def serve(folder: str, *words: str) -> None:
    """Answer until the input ends."""
    answers, questions, process = own_stdout(), own_stdin(), os.getpid()
    if os.name == "posix":
        os.setpgrp()  # what it starts stops and ends with it

    def answer(value: Any) -> None:
        if os.getpid() != process:  # a fork that has come back here
            os._exit(0)
        torch.save(value, Path(folder, ANSWER))
        answers.write("\n")
        answers.flush()

    try:
        server = Server(*words)
        answer({"shapes": server.side.shapes})
        for _ in questions:
            asked = torch.load(Path(folder, ASKED), weights_only=True)
            try:
                answer(getattr(server, asked.pop("work"))(**asked) or {})
            except BaseException as error:
                answer({"error": in_a_line(error)})
    except BaseException as error:
        answer({"error": in_a_line(error)})


if __name__ == "__main__":
    serve(*sys.argv[1:])

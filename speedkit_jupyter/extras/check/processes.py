"""Functions and modules by file and name, and each in a process of its own.

The clock, the inputs and the comparison stay in this process. The other one writes down what it
computed before it answers: what comes too late is not there.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from select import select
from typing import Any

import torch

from speedkit_jupyter.extras.check.calls import Drawn, Here, Taken, inputs_of
from speedkit_jupyter.extras.check.watch import PatchWatch
from speedkit_jupyter.step.memory import MemoryUse
from speedkit_jupyter.support.exceptions import (
    ArgumentError,
    SpeedKitError,
    did_you_mean,
    in_a_line,
)
from speedkit_jupyter.torchglue.private import tree_map

# An answer that takes longer is not waited for, but on Windows.
PATIENCE_S = 300.0
# Where a file is memory: elsewhere the system's own folder for such files does.
IN_MEMORY = "/dev/shm"
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


def _zeros(value: Any) -> Any:
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else value


class Elsewhere:
    """A side in a process of its own, which does what `Here` does. It ends with its `with`."""

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
            stack.callback(self._process.communicate)
            stack.callback(self._process.kill)
            self.shapes = self._answer()["shapes"]
            self._stack = stack.pop_all()

    def __enter__(self) -> Elsewhere:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def prepare(self, drawn: Sequence[Drawn], reuse: bool = False) -> None:
        """Tell it the next calls. It learns the numbers of their inputs when the clock runs."""
        self._inputs = [dict(inputs_of(one.arguments)) for one in drawn]
        blank = [{**vars(one), "arguments": tree_map(_zeros, one.arguments)} for one in drawn]
        self._ask("prepare", calls=blank, reuse=reuse)

    def run(self, computes: bool = True) -> None:
        """Give it the inputs, and read what it computed; or do all but computing."""
        self._read = self._ask("run", inputs=self._inputs, computes=computes)["outputs"]

    def take(self, full: bool = False) -> list[Taken]:
        """Return what was read; if `full` also what the calls left."""
        taken = [Taken(**one) for one in self._ask("take", full=full)["taken"]]
        if not full:
            for one, values in zip(taken, self._read, strict=True):
                one.values = values
        return taken

    def memory(self) -> MemoryUse:
        """Return what it needs, by its own account."""
        return MemoryUse(**self._ask("memory"))

    def _ask(self, work: str, **more: Any) -> dict[str, Any]:
        assert self._process.stdin
        torch.save({"work": work, **more}, self._folder / ASKED)
        with suppress(BrokenPipeError):  # the answer says why
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        """Return it. Raises SpeedKitError where there is none in time, or it is an error."""
        assert self._process.stdout
        stream = self._process.stdout
        if os.name == "posix" and not select([stream], [], [], PATIENCE_S)[0]:
            self._process.kill()
        if not stream.readline():
            raise SpeedKitError(f"its process ended or was ended ({self._process.wait()})")
        answer = dict(torch.load(self._folder / ANSWER, weights_only=True))
        if "error" in answer:
            raise SpeedKitError(str(answer["error"]))
        return answer


class Server:
    """The other process: each method answers the one of its name of `Elsewhere`."""

    def __init__(self, word: str, gradients: str) -> None:
        self.side = Here(loaded(word), gradients == "1", PatchWatch())

    def prepare(self, calls: Sequence[dict[str, Any]], reuse: bool) -> None:
        """Make what the next calls are given, but for its numbers."""
        self.side.prepare([Drawn(**one) for one in calls], reuse)

    def run(self, inputs: Sequence[dict[str, Any]], computes: bool) -> dict[str, Any]:
        """Write the inputs, compute, and return the results, or else the last ones."""
        for given, values in zip(self.side.given, inputs, strict=True):
            for name, tensor in inputs_of(given):
                tensor.data.copy_(values[name])
        if computes:
            self.side.run()
        copies = [{n: t.detach().clone() for n, t in one.items()} for one in self.side.results]
        return {"outputs": copies}

    def take(self, full: bool) -> dict[str, Any]:
        """Return what the calls gave; unless `full`, without the values, which are there."""
        taken = self.side.take(full)
        return {"taken": [vars(one) | ({} if full else {"values": {}}) for one in taken]}

    def memory(self) -> dict[str, Any]:
        """Return its peak and state."""
        return vars(self.side.memory())


def serve(folder: str, *words: str) -> None:
    """Answer until the input ends; what the function prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value: Any) -> None:
        torch.save(value, Path(folder, ANSWER))
        answers.write("\n")
        answers.flush()

    try:
        server = Server(*words)
        answer({"shapes": server.side.shapes})
        for _ in sys.stdin:
            asked = torch.load(Path(folder, ASKED), weights_only=True)
            try:
                answer(getattr(server, asked.pop("work"))(**asked) or {})
            except BaseException as error:
                answer({"error": in_a_line(error)})
    except BaseException as error:
        answer({"error": in_a_line(error)})


if __name__ == "__main__":
    serve(*sys.argv[1:])

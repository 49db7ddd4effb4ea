"""Functions and modules by file and name, and each in a process of its own.

The clock, the inputs and the comparison stay in this process. The other one writes down what it
computed before it answers: what comes too late is not there.
"""

from __future__ import annotations

import importlib.util
import json
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

from speedkit_jupyter.checking.calls import Drawn, Here, Taken, inputs_of
from speedkit_jupyter.checking.watch import Watch
from speedkit_jupyter.measure.checks.memory import Memory
from speedkit_jupyter.support.exceptions import (
    ArgumentError,
    SpeedKitError,
    did_you_mean,
    in_a_line,
)
from speedkit_jupyter.support.torch_private import tree_map

# An answer that takes longer is not waited for, but on Windows.
PATIENCE_S = 300.0
# Where a file is memory: elsewhere the system's own folder for such files does.
IN_MEMORY = "/dev/shm"
CALLS, INPUTS, OUTPUTS, LEFT = "calls.pt", "inputs.pt", "outputs.pt", "left.pt"


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
            self.shapes = {name: tuple(size) for name, size in self._answer()["shapes"].items()}
            self._stack = stack.pop_all()

    def __enter__(self) -> Elsewhere:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def prepare(self, drawn: Sequence[Drawn], reuse: bool = False) -> None:
        """Tell it the next calls. It learns the numbers of their inputs when the clock runs."""
        self._inputs = [dict(inputs_of(one.arguments)) for one in drawn]
        blank = [{**vars(one), "arguments": tree_map(_zeros, one.arguments)} for one in drawn]
        torch.save(blank, self._folder / CALLS)
        self._ask("prepare", reuse=reuse)

    def run(self, computes: bool = True) -> None:
        """Give it the inputs, and read what it computed; or do all but computing."""
        torch.save(self._inputs, self._folder / INPUTS)
        self._ask("run", computes=computes)
        self._read = torch.load(self._folder / OUTPUTS, weights_only=True)

    def take(self, full: bool = False) -> list[Taken]:
        """Return what was read; if `full` also what the calls left."""
        faults = [str(one) for one in self._ask("take", full=full)["faults"]]
        if full:
            return [Taken(**one) for one in torch.load(self._folder / LEFT, weights_only=True)]
        return [Taken(values, faults=faults * (at == 0)) for at, values in enumerate(self._read)]

    def memory(self) -> Memory:
        """Return what it needs, by its own account."""
        return Memory(**self._ask("memory"))

    def _ask(self, work: str, **more: Any) -> dict[str, Any]:
        assert self._process.stdin
        with suppress(BrokenPipeError):  # the answer says why
            self._process.stdin.write(json.dumps({"work": work, **more}) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        """Return it. Raises SpeedKitError where there is none in time, or it is an error."""
        assert self._process.stdout
        stream = self._process.stdout
        if os.name == "posix" and not select([stream], [], [], PATIENCE_S)[0]:
            self._process.kill()
        line = stream.readline()
        try:
            answer = dict(json.loads(line))
        except ValueError:
            code = self._process.wait() if not line else "another answer than ours"
            raise SpeedKitError(f"its process ended or was ended ({code})") from None
        if "error" in answer:
            raise SpeedKitError(str(answer["error"]))
        return answer


class Server:
    """The other process: each method answers the one of its name of `Elsewhere`."""

    def __init__(self, folder: str, word: str, gradients: str) -> None:
        self._folder = Path(folder)
        self.side = Here(loaded(word), gradients == "1", Watch())

    def prepare(self, reuse: bool) -> None:
        """Read what the next calls are, but for the numbers of their inputs."""
        calls = torch.load(self._folder / CALLS, weights_only=True)
        self.side.prepare([Drawn(**one) for one in calls], reuse)

    def run(self, computes: bool) -> None:
        """Read the inputs, compute, and write down the results, or else the last ones."""
        given = torch.load(self._folder / INPUTS, weights_only=True)
        for inputs, values in zip(self.side.given, given, strict=True):
            for name, tensor in inputs_of(inputs):
                tensor.data.copy_(values[name])
        if computes:
            self.side.run()
        copies = [{n: t.detach().clone() for n, t in one.items()} for one in self.side.results]
        torch.save(copies, self._folder / OUTPUTS)

    def take(self, full: bool) -> dict[str, Any]:
        """Return what is wrong; if `full`, write down all that the calls left."""
        taken = self.side.take(full)
        if full:
            torch.save([vars(one) for one in taken], self._folder / LEFT)
        return {"faults": [fault for one in taken for fault in one.faults]}

    def memory(self) -> dict[str, Any]:
        """Return its peak and state."""
        return vars(self.side.memory())


def serve(*words: str) -> None:
    """Answer until the input ends; what the function prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        server = Server(*words)
        answer({"shapes": server.side.shapes})
        for line in sys.stdin:
            asked = json.loads(line)
            try:
                answer(getattr(server, asked.pop("work"))(**asked) or {})
            except BaseException as error:
                answer({"error": in_a_line(error)})
    except BaseException as error:
        answer({"error": in_a_line(error)})


if __name__ == "__main__":
    serve(*sys.argv[1:])

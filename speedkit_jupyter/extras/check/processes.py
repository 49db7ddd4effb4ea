"""Load functions and modules by file and name, and run each in its own process.

The inputs and the comparison stay in this process.
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from speedkit_jupyter.extras.check.calls import CallResult, LocalSide
from speedkit_jupyter.extras.check.inputs import UNKNOWN, CallInputs, form
from speedkit_jupyter.support.exceptions import (
    ArgumentError,
    SpeedKitError,
    did_you_mean,
    in_a_line,
)

# A process without an answer for this long is ended: compiling takes a minute or two.
PATIENCE_S = 300.0


def is_word(value: Any) -> bool:
    """Return whether text names an object of a file, as `candidate.py:f` does."""
    return isinstance(value, str) and ".py:" in value


def located(word: str) -> Path:
    """Return the file of a word. Raises ArgumentError where there is none."""
    path, _, name = word.rpartition(":")
    file = Path(path).expanduser().resolve()
    if not path.endswith(".py") or not name.isidentifier():
        raise ArgumentError(f"{word!r} must name a function of a file, as in kernels.py:softmax")
    if not file.is_file():
        raise ArgumentError(f"there is no file {path}")
    return file


def loaded(word: str) -> Any:
    """Return the object that `file.py:name` names; of a class of modules a new one, seeded.

    Raises ArgumentError where there is no such file or name, and what the file raises.
    """
    file, name = located(word), word.rpartition(":")[2]
    module = ModuleType(f"_checked_{file.stem}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module  # where dataclasses look for it
    names = vars(module)
    exec(compile(file.read_bytes(), file, "exec"), names)
    if name not in names:
        raise ArgumentError(f"{file.name} has no {name}.{did_you_mean(name, names)}")
    found = names[name]
    if isinstance(found, type) and issubclass(found, torch.nn.Module):
        torch.manual_seed(0)
        found = found()
    return found


class RemoteSide:
    """A side in its own process, with the methods of `LocalSide`. The process ends with the block.

    Between requests the process is stopped, so that it uses no core out of turn.
    Raises SpeedKitError on Windows.
    """

    def __init__(self, word: str, gradients: bool) -> None:
        if os.name != "posix":
            raise SpeedKitError("functions of files need Linux or macOS: give functions instead")
        self._connection, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, word, str(int(gradients)), str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what loaded files print goes to stderr
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        try:
            self.shapes = self._ask("shapes")
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> RemoteSide:
        return self

    def __exit__(self, *_: object) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._connection.close()

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and all that it has started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def prepare(self, drawn: Sequence[CallInputs]) -> None:
        """Send the inputs of the next calls. Raises ArgumentError for other objects than values."""
        for name, part in drawn[0].inputs.items():
            if (kind := form(part)).endswith(UNKNOWN):
                raise ArgumentError(f"the input {name} is {kind}, nor send to a process")
        self._ask("prepare", [one.copied() for one in drawn])

    def run(self) -> float:
        """Make the calls; return their seconds, by the process's own clock."""
        return float(self._ask("run"))

    def take(self) -> list[CallResult]:
        """Return the results of the last calls."""
        return [CallResult(**one) for one in self._ask("take")]

    def _ask(self, work: str, *given: Any) -> Any:
        """Return an answer. Raises SpeedKitError for an error, or where none comes in time."""
        self._signal(signal.SIGCONT)
        try:
            self._connection.send_bytes(_packed((work, given)))
            if not self._connection.poll(PATIENCE_S):
                raise EOFError
            packed = io.BytesIO(self._connection.recv_bytes())
        except (EOFError, OSError):
            self._signal(signal.SIGKILL)
            ended = self._process.wait()
            raise SpeedKitError(f"its process ended or was ended ({ended})") from None
        self._signal(signal.SIGSTOP)
        error, answer = torch.load(packed, weights_only=True)
        if error:
            raise SpeedKitError(error)
        return answer


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def serve(word: str, gradients: str, descriptor: str) -> None:
    """Answer until the questions end, each with an error or a value."""
    connection, side = Connection(int(descriptor)), None
    with suppress(EOFError):
        while True:
            work, given = torch.load(io.BytesIO(connection.recv_bytes()), weights_only=False)
            try:
                side = side or LocalSide(loaded(word), gradients == "1", watched=True)
                answer = getattr(side, work)(*given) if work != "shapes" else side.shapes
                answer = [vars(one) for one in answer] if work == "take" else answer
                connection.send_bytes(_packed(("", answer)))
            except BaseException as error:
                connection.send_bytes(_packed((in_a_line(error), None)))


if __name__ == "__main__":
    serve(*sys.argv[1:])

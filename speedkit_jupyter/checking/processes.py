"""A function of a file in a process of its own, which this one times and reads the results of.

The clock, the inputs and the comparison stay here. The other process writes what it computed into
memory that both share before it answers, so an answer that comes too early has wrong values in it.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, islice
from pathlib import Path
from select import select
from typing import TYPE_CHECKING, Any

from speedkit_jupyter.checking.calls import Drawn, Here, Taken, Values, inputs_of
from speedkit_jupyter.checking.loading import loaded
from speedkit_jupyter.checking.watch import Watch
from speedkit_jupyter.measure.checks.memory import Memory
from speedkit_jupyter.support.exceptions import SpeedKitError, in_a_line
from speedkit_jupyter.support.torch_private import tree_map

if TYPE_CHECKING:
    import torch

# An answer that takes longer is not waited for, but on Windows.
PATIENCE_S = 300.0
CALLS, RESULTS = "calls.pt", "results.pt"
GIVEN, GAVE = "given.bin", "gave.bin"
# Where a file is memory: elsewhere the system's own folder for such files does.
IN_MEMORY = "/dev/shm"
# Every tensor begins at a multiple of this.
ALIGNED = 64
Layout = list[tuple[str, str, list[int]]]  # names, dtypes, shapes


def layout_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> Layout:
    """Return what memory for them is to be like."""
    return [(name, str(t.dtype)[6:], list(t.shape)) for name, t in tensors]


def _blank(value: Any) -> Any:
    import torch

    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else value


def shared(file: Path, layout: Layout, calls: int) -> list[Values]:
    """Return tensors in memory that both processes see, for each call."""
    import torch

    sizes = [math.prod(shape) * getattr(torch, dtype).itemsize for _, dtype, shape in layout]
    steps = [-(-size // ALIGNED) * ALIGNED for size in sizes]
    length, begins = max(calls * sum(steps), ALIGNED), accumulate(steps * calls, initial=0)
    memory = torch.from_file(str(file), shared=True, size=length, dtype=torch.uint8)
    tensors = (
        (name, memory[begin : begin + size].view(getattr(torch, dtype)).reshape(shape))
        for (name, dtype, shape), size, begin in zip(
            layout * calls, sizes * calls, begins, strict=False
        )
    )
    return [dict(islice(tensors, len(layout))) for _ in range(calls)]


class Elsewhere:
    """A side in a process of its own. Close it, or leave its `with`."""

    is_apart = True

    def __init__(self, word: str, gradients: bool) -> None:
        folder = IN_MEMORY if os.access(IN_MEMORY, os.W_OK) else None
        self._folder = tempfile.TemporaryDirectory(dir=folder, prefix="speedkit-")
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, self._folder.name, word, str(int(gradients))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._layout: Layout = []
        self._inputs: list[torch.Tensor] = []
        self._places: list[torch.Tensor] = []
        try:
            self.shapes = {name: tuple(size) for name, size in self._answer()["shapes"]}
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Elsewhere:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, and give back the memory."""
        self._process.kill()
        self._process.communicate()
        self._folder.cleanup()

    def expect(self, values: Values) -> None:
        """Share memory for values of these shapes and dtypes from the next `prepare` on."""
        self._layout = layout_of(values.items())

    def prepare(self, drawn: Sequence[Drawn], reuse: bool = False) -> None:
        """Give it the next inputs, and memory for what they lead to."""
        import torch

        path = Path(self._folder.name)
        self._inputs = [t.detach() for one in drawn for _, t in inputs_of(one.arguments)]
        given = layout_of(inputs_of(drawn[0].arguments))
        places = shared(path / GIVEN, given, len(drawn))
        self._places = [tensor for one in places for tensor in one.values()]
        # It learns the numbers when the clock runs.
        blank = [replace(one, arguments=tree_map(_blank, dict(one.arguments))) for one in drawn]
        torch.save([vars(one) for one in blank], path / CALLS)
        self._gave = shared(path / GAVE, self._layout, len(drawn))
        for tensor in (t for one in self._gave for t in one.values()):
            tensor.zero_()
        self._ask("prepare", reuse=reuse, given=given, gave=self._layout)

    def run(self) -> None:
        """Give it the inputs; it computes and writes down the results."""
        self._fill()
        self._ask("run")
        # At once: what comes late is not what was timed.
        self._read = [{name: t.clone() for name, t in one.items()} for one in self._gave]

    def relay(self) -> None:
        """Do all that `run` does but computing."""
        self._fill()
        self._ask("relay")

    def _fill(self) -> None:
        for place, tensor in zip(self._places, self._inputs, strict=True):
            place.copy_(tensor)

    def take(self, full: bool = False) -> list[Taken]:
        """Read what it computed."""
        import torch

        found = self._ask("take", full=full)
        if full:
            kept = torch.load(Path(self._folder.name) / RESULTS, weights_only=True)
            return [Taken(**one) for one in kept]
        faults = [str(one) for one in found["faults"]]
        return [Taken(values, faults=faults * (at == 0)) for at, values in enumerate(self._read)]

    def memory(self) -> Memory:
        """Return what it needs, by its own account."""
        return Memory(*self._ask("memory")["memory"])

    def _ask(self, work: str, **more: Any) -> dict[str, Any]:
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps({"work": work, **more}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer says why
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
    """The other process: answers one line of JSON with another."""

    def __init__(self, folder: str, word: str, gradients: bool) -> None:
        self._folder = Path(folder)
        self._side = Here(loaded(word), gradients, Watch())
        self._targets: list[Values] = []
        self._sources: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.shapes = list(self._side.shapes.items())

    def prepare(self, reuse: bool, given: Layout, gave: Layout) -> None:
        """Read what the next calls are, but for the numbers of their inputs."""
        import torch

        drawn = [Drawn(**one) for one in torch.load(self._folder / CALLS, weights_only=True)]
        self._side.prepare(drawn, reuse)
        self._targets = shared(self._folder / GAVE, gave, len(drawn))
        places = shared(self._folder / GIVEN, given, len(drawn))
        own = [t.data for one in self._side.given for _, t in inputs_of(one)]
        self._sources = list(zip(own, (t for one in places for t in one.values()), strict=True))

    def run(self) -> None:
        """Take the inputs, compute, and write down the results."""
        self._fill()
        self._side.run()
        self._deliver()

    def relay(self) -> None:
        """Take the inputs and write down the results."""
        self._fill()
        self._deliver()

    def _fill(self) -> None:
        for tensor, place in self._sources:
            tensor.copy_(place)

    def _deliver(self) -> None:
        for target, values in zip(self._targets, self._side.results(), strict=False):
            for name, place in target.items():
                if name in values:
                    place.copy_(values[name].detach())

    def take(self, full: bool) -> dict[str, Any]:
        """Return what is wrong; if `full`, write down all that the calls left."""
        import torch

        taken = self._side.take(full)
        if full:
            torch.save([vars(one) for one in taken], self._folder / RESULTS)
        return {"faults": [fault for one in taken for fault in one.faults]}

    def memory(self) -> dict[str, Any]:
        """Return its peak and state."""
        found = self._side.memory()
        return {"memory": [found.peak_bytes, found.state_bytes]}


def serve(folder: str, word: str, gradients: str) -> None:
    """Answer until the input ends; what the function prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        server = Server(folder, word, gradients == "1")
    except BaseException as error:
        answer({"error": in_a_line(error)})
        return
    answer({"shapes": server.shapes})
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer(getattr(server, asked.pop("work"))(**asked) or {})
        except BaseException as error:
            answer({"error": in_a_line(error)})


if __name__ == "__main__":
    serve(*sys.argv[1:])

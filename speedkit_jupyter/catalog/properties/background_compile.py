"""Compiles a model in another process while it runs as before: into the cache that both share.

Dynamo traces the model here, once. The other process gets the graphs, and inputs of the same shapes
but no values; it compiles them as they will be compiled here, which then finds the code in the
cache. So the model is held up twice for a second or two, and not for all that compiling takes.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch

from speedkit_jupyter.machines import compile_cache
from speedkit_jupyter.torchglue import dynamo as torch_private

PROGRAM = f"from {__name__} import compile_all; compile_all()"
# The other process gives way to the model's own steps.
NICENESS = 10


class Beside:
    """The graphs of a model, and the process that compiles them with the same `options`."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options, self._graphs = dict(options), list[Any]()
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (open as long as the process runs)
        self.why_not = ""

    def trace(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        """Note a graph and how its inputs look, as a backend of torch.compile; run it as it is."""
        try:
            noted = copy.deepcopy(graph)
            noted.meta.clear()
            for node in noted.graph.nodes:
                node.meta.clear()  # has tensors of this process
            device = next((one.device.type for one in inputs if hasattr(one, "device")), "cpu")
            is_lowered = torch.is_autocast_enabled(device)
            lowered = torch.get_autocast_dtype(device) if is_lowered else None
            looks = [_look(one) for one in inputs]
            mode = (device, lowered, torch.is_grad_enabled())
            self._graphs.append((noted, looks, mode))
        except Exception as error:
            self.why_not = f"{type(error).__name__}: {error}"
        return graph.forward  # type: ignore[no-any-return]

    @property
    def is_waiting(self) -> bool:
        """Return whether all is traced, and the process has it."""
        return self._process is not None

    def begin(self) -> None:
        """Start the process, with all graphs that were traced by now."""
        settings = {name: switch.read() for name, switch in compile_cache.switches().items()}
        given = (self._graphs, self._options, torch.get_num_threads(), settings)
        with tempfile.TemporaryFile() as file:
            try:
                torch.save(given, file)
            except Exception as error:
                self.why_not = f"{type(error).__name__}: {error}"
                return
            file.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM],
                stdin=file,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                start_new_session=True,  # Jupyter's interrupt is not for this one
            )
        weakref.finalize(self, self._process.kill)

    def is_done(self) -> bool:
        """Return whether nothing is to be waited for any more; `why_not` says what went wrong."""
        code = None if self._process is None else self._process.poll()
        if code:
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
            self.why_not = lines[-1] if lines else f"the process ended with code {code}"
        return code is not None or bool(self.why_not)

    def end(self) -> None:
        """Stop the process: its plan is taken back."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _look(value: Any) -> Any:
    """Return how a tensor looks, or a number; TypeError for anything else."""
    if isinstance(value, torch.Tensor):
        kind = torch.nn.Parameter if isinstance(value, torch.nn.Parameter) else None
        place = (tuple(value.shape), value.stride(), value.dtype, value.device)
        return kind, place, value.requires_grad
    if type(value) in (int, float, bool):
        return value
    raise TypeError(f"a graph takes a {type(value).__name__}")


def _like(look: Any) -> Any:
    if not isinstance(look, tuple):
        return look
    kind, (shape, strides, dtype, device), requires_grad = look
    tensor = torch.empty_strided(shape, strides, dtype=dtype, device=device).zero_()
    return kind(tensor, requires_grad) if kind else tensor.requires_grad_(requires_grad)


def compile_all() -> None:
    """Compile what the standard input has, as the other process."""
    import io

    with suppress(AttributeError, OSError):
        os.nice(NICENESS)
    data = io.BytesIO(sys.stdin.buffer.read())
    graphs, options, threads, settings = torch.load(data, weights_only=False)
    torch.set_num_threads(threads)
    torch_private.import_compiler()  # which has them
    for name, switch in compile_cache.switches().items():
        switch.write(settings[name])
    config, backward = torch_private.eager_backward()
    for name, value in backward.items():
        setattr(config, name, value)
    for graph, looks, (device, lowered, has_gradients) in graphs:
        lowering = torch.autocast(device, lowered, enabled=lowered is not None)
        with torch.set_grad_enabled(has_gradients), lowering:
            torch.compile(graph, **options)(*map(_like, looks))

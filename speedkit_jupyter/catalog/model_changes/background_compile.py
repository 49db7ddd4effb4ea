"""Compile a model in a child process into a shared cache, while the model runs uncompiled.

Dynamo traces the model in this process. The child process compiles the graphs for inputs of the
recorded shapes. Then this process traces again, and loads the code from the cache. The model waits
a second or two for each trace, not for the whole compilation. A file in the cache's folder marks
compiled graphs, so that no process compiles them again.
"""

from __future__ import annotations

import copy
import hashlib
import io
import os
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from speedkit_jupyter.machines import compile_cache
from speedkit_jupyter.torchglue import dynamo as torch_private

PROGRAM = f"from {__name__} import compile_all; compile_all()"


class SubprocessCompiler:
    """Compile a model's graphs with `options` in a child process."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options, self._graphs = dict(options), list[Any]()
        self._process: subprocess.Popen[bytes] | None = None
        self._mark, self._is_kept = Path(), False
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (open while the process runs)
        self.why_not = ""

    def trace(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        """Record a graph, as a backend of torch.compile; return its uncompiled function."""
        try:
            recorded = copy.deepcopy(graph)
            recorded.meta.clear()
            for node in recorded.graph.nodes:
                node.meta.clear()  # the metadata refers to tensors of this process
            device = next((one.device.type for one in inputs if hasattr(one, "device")), "cpu")
            is_lowered = torch.is_autocast_enabled(device)
            lowered = torch.get_autocast_dtype(device) if is_lowered else None
            mode = (device, lowered, torch.is_grad_enabled())
            self._graphs.append((recorded, [_description(one) for one in inputs], mode))
        except Exception as error:
            self.why_not = f"{type(error).__name__}: {error}"
        return graph.forward  # type: ignore[no-any-return]

    @property
    def is_waiting(self) -> bool:
        """Return whether the child process was started, or is not needed."""
        return self._process is not None or self._is_kept

    def begin(self) -> None:
        """Start the child process unless the graphs are compiled; set `why_not` on failure."""
        settings = {name: flag.read() for name, flag in compile_cache.compiler_flags().items()}
        self._mark = self._mark_in(settings[compile_cache.FOLDER])
        self._is_kept = self._mark.is_file() and not self.why_not
        if self._is_kept:
            return
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
                start_new_session=True,  # Jupyter's interrupt must not stop the child
            )
        weakref.finalize(self, self._process.kill)

    def _mark_in(self, folder: str | None) -> Path:
        """Return the file that marks the graphs as compiled; `Path()` if they can't be marked."""
        codes = [(str(graph.graph), *rest) for graph, *rest in self._graphs]
        if folder is None or "get_attr" in str(codes):  # equal code may have different constants
            return Path()
        words = repr((codes, sorted(self._options.items()), torch.get_num_threads()))
        return Path(folder, f"speedkit-{hashlib.sha256(words.encode()).hexdigest()[:32]}")

    def is_done(self) -> bool:
        """Return whether compiling is over; if it is, mark the graphs or set `why_not`."""
        code = None if self._process is None else self._process.poll()
        if code == 0 and self._mark != Path():
            with suppress(OSError):
                self._mark.touch()
        if code:
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
            self.why_not = lines[-1] if lines else f"the process ended with code {code}"
        return code is not None or self._is_kept or bool(self.why_not)

    def end(self) -> None:
        """Stop the process, if any."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _description(value: Any) -> Any:
    """Return a tensor's properties, or a number unchanged. Raises TypeError for other values."""
    if isinstance(value, torch.Tensor):
        kind = torch.nn.Parameter if isinstance(value, torch.nn.Parameter) else None
        place = (tuple(value.shape), value.stride(), value.dtype, value.device)
        return kind, place, value.requires_grad
    if type(value) in (int, float, bool):
        return value
    raise TypeError(f"a graph takes a {type(value).__name__}")


def _made(description: Any) -> Any:
    """Return a tensor of zeros for a description; return a number unchanged."""
    if not isinstance(description, tuple):
        return description
    kind, (shape, strides, dtype, device), requires_grad = description
    tensor = torch.empty_strided(shape, strides, dtype=dtype, device=device).zero_()
    return kind(tensor, requires_grad) if kind else tensor.requires_grad_(requires_grad)


def compile_all() -> None:
    """Compile the graphs from standard input: the child process's main function."""
    with suppress(AttributeError, OSError):
        os.nice(10)  # the model's steps have priority
    data = io.BytesIO(sys.stdin.buffer.read())
    graphs, options, threads, settings = torch.load(data, weights_only=False)
    torch.set_num_threads(threads)
    torch_private.import_compiler()  # defines the flags
    for name, flag in compile_cache.compiler_flags().items():
        flag.write(settings[name])
    config, backward = torch_private.eager_backward()
    for name, value in backward.items():
        setattr(config, name, value)
    for graph, inputs, (device, lowered, has_gradients) in graphs:
        lowering = torch.autocast(device, lowered, enabled=lowered is not None)
        with torch.set_grad_enabled(has_gradients), lowering:
            torch.compile(graph, **options)(*map(_made, inputs))

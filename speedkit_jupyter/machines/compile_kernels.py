"""Has a graph's C++ kernels built in one run of the compiler, while its backward pass is traced.

torch starts the compiler for each kernel, which reads torch's headers for 1.4 s; one more kernel in
the same run takes 0.06 s (g++ 12, AVX-512). The code of each kernel, and its flags, stay the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.machinery import ExtensionFileLoader
from threading import Lock
from typing import Any

from speedkit_jupyter.machines import probes
from speedkit_jupyter.machines.flags import Switch
from speedkit_jupyter.support import torch_private

JOINED = "inductor.async_compile.AsyncCompile"
# Other kernels of a graph are built beside these: by then they take as long as the headers.
MOST = 30
# What a kernel begins with. One with more headers is left to torch: here it is in a namespace.
HEADER = "#include <torch/csrc/inductor/cpp_prefix.h>"
# Those of the code by which Python calls it.
BINDING_HEADERS = ("Python.h", "sstream", "cstdlib", "cerrno")
Function = Callable[..., Any]


class Kernel:
    """Stands for a kernel until the graph's kernels are built; a call waits for that."""

    def __init__(self, types: Sequence[str], code: str) -> None:
        self.types, self.code = types, code
        self.function: Function | None = None
        self.load: Callable[[], None]

    def __call__(self, *args: Any) -> Any:
        if self.function is None:
            finish()
        if self.function is None:  # it failed before
            self.load()
        assert self.function is not None
        return self.function(*args)


class Graph:
    """Kernels that are built in one run. `names` are those by which generated code calls them."""

    def __init__(self, kernels: Mapping[str, Kernel], names: dict[str, Any]) -> None:
        self._kernels, self._names = kernels, names
        self._code = joined([*kernels.values()])
        for kernel in kernels.values():
            kernel.load = self.load
        torch_private.kernel_library(self._code)

    def load(self) -> None:
        """Wait for the library, and have the generated code call what is in it."""
        first = torch_private.kernel_library(self._code)()
        for number, (name, kernel) in enumerate(self._kernels.items()):
            kernel.function = _function(first, number)
            if self._names.get(name) is kernel:
                self._names[name] = kernel.function


# State at module level, on purpose: what torch compiles belongs to the whole process.
LOCK, BUILDING = Lock(), list[Graph]()


def finish() -> None:
    """Wait for all kernels that are being built. Raises the first error, once all have ended."""
    with LOCK:
        graphs, errors = [*BUILDING], list[Exception]()
        BUILDING.clear()
        for graph in graphs:
            try:
                graph.load()
            except Exception as error:
                errors.append(error)
    if errors:
        raise errors[0]


def joined(kernels: Sequence[Kernel]) -> str:
    """Return the C++ code of a library, in which each kernel is a Python module."""
    parts = [HEADER, "#define PY_SSIZE_T_CLEAN", *(f"#include <{one}>" for one in BINDING_HEADERS)]
    for number, kernel in enumerate(kernels):
        code = torch_private.with_bindings(kernel.types, kernel.code.replace(HEADER, "", 1))
        code = code.replace('extern "C"', "").replace("PyInit_kernel", f"PyInit_{_name(number)}")
        parts.append(f"namespace {_name(number)} {{\n{code}\n}}")
    return "\n".join(parts)


def _name(number: int) -> str:
    return f"kernel{number or ''}"


def _function(first: Any, number: int) -> Function:
    if not number:
        return first.kernel  # type: ignore[no-any-return]
    name = f"{first.__name__.rpartition('.')[0]}.{_name(number)}"
    return ExtensionFileLoader(name, first.__file__).load_module().kernel


@cache
def _joining(usual: Any) -> Any:
    """Return torch's class, by which generated code has kernels built, that joins them."""

    class Joining(usual):  # type: ignore[misc]
        def cpp_pybinding(self, argtypes: list[str], source_code: str) -> Any:
            if source_code.count("#include") == source_code.count(HEADER) == 1:
                return Kernel(argtypes, source_code)
            return super().cpp_pybinding(argtypes, source_code)

        def wait(self, scope: dict[str, Any]) -> None:
            found = [(name, one) for name, one in scope.items() if isinstance(one, Kernel)]
            every = [found[at : at + MOST] for at in range(0, len(found), MOST)]
            BUILDING.extend(Graph(dict(some), scope) for some in every)
            super().wait(scope)
            if not torch_private.is_forward_of_training():  # else the backward pass comes next
                finish()

    return Joining


def switches() -> dict[str, Switch]:
    """Return the switch that joins kernels, where that was tried and torch's compiler is loaded."""
    module = torch_private.kernel_builder()
    if module is None or sys.platform != "linux" or not probes.cxx():
        return {}
    usual = next(one for one in module.AsyncCompile.__mro__ if one.__module__ == module.__name__)

    def write(on: bool) -> None:
        module.AsyncCompile = _joining(usual) if on else usual

    return {JOINED: Switch(lambda: module.AsyncCompile is _joining(usual), write, (True,))}

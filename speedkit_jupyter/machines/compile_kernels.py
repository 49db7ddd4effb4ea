"""Has a graph's C++ kernels built in one run of the compiler, while its backward pass is traced.

torch starts the compiler for each kernel, which reads torch's headers for 1.4 s; one more kernel in
the same run takes 0.06 s (g++ 12, AVX-512). The code of each kernel, and its flags, stay the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from typing import Any

from speedkit_jupyter.machines.flags import Switch
from speedkit_jupyter.torchglue import inductor as torch_private

JOINED = "inductor.async_compile.AsyncCompile"
# Other kernels of a graph are built beside these: by then they take as long as the headers.
MOST = 30
# What a kernel begins with. One with more headers is left to torch: here it is in a namespace.
HEADER = "#include <torch/csrc/inductor/cpp_prefix.h>"
# Those of the code by which Python calls it.
BINDING_HEADERS = ("Python.h", "sstream", "cstdlib", "cerrno")


class Kernel:
    """Stands for a kernel with its bindings to Python until it is built; a call waits for that."""

    def __init__(self, code: str) -> None:
        self.code = code
        self.function: Any = None
        self.load: Callable[[], None]

    def __call__(self, *args: Any) -> Any:
        finish()
        if self.function is None:  # what was built with it has failed
            self.load()
        return self.function(*args)


class Graph:
    """Kernels that are built in one run. `names` are those by which generated code calls them."""

    def __init__(self, kernels: Mapping[str, Kernel], names: dict[str, Any]) -> None:
        self._kernels, self._names = kernels, names
        self._code = joined([kernel.code for kernel in kernels.values()])
        for kernel in kernels.values():
            kernel.load = self.load
        torch_private.kernel_library(self._code)

    def load(self) -> None:
        """Wait for the library, and have the generated code call what is in it."""
        first = torch_private.kernel_library(self._code)()
        for number, (name, kernel) in enumerate(self._kernels.items()):
            module = _module(first.__file__, f"{first.__name__}{number}") if number else first
            kernel.function = module.kernel
            if self._names.get(name) is kernel:
                self._names[name] = kernel.function


# State at module level, on purpose: what torch compiles belongs to the whole process.
BUILDING: list[Graph] = []


def finish() -> None:
    """Wait for all kernels that are being built. Raises what torch raises where one can't be."""
    try:
        while BUILDING:
            BUILDING.pop(0).load()
    finally:
        BUILDING.clear()


def joined(kernels: Iterable[str]) -> str:
    """Return the code of a library in which each kernel is a module: `kernel`, `kernel1`, …"""
    parts = [HEADER, "#define PY_SSIZE_T_CLEAN", *(f"#include <{one}>" for one in BINDING_HEADERS)]
    for number, code in enumerate(kernels):
        code = code.replace(HEADER, "").replace('extern "C"', "")
        code = code.replace("PyInit_kernel", f"PyInit_kernel{number or ''}")
        parts.append(f"namespace kernel{number} {{\n{code}\n}}")
    return "\n".join(parts)


def _module(library: str, name: str) -> Any:
    loader = ExtensionFileLoader(name, library)
    module = module_from_spec(ModuleSpec(name, loader, origin=library))
    loader.exec_module(module)
    return module


@cache
def _joining(usual: Any) -> Any:
    """Return torch's class, by which generated code has kernels built, that joins them."""

    class Joining(usual):  # type: ignore[misc]
        def cpp_pybinding(self, argtypes: list[str], source_code: str) -> Any:
            if source_code.count("#include") == source_code.count(HEADER) == 1:
                return Kernel(torch_private.with_bindings(argtypes, source_code))
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
    if module is None or sys.platform != "linux":
        return {}
    usual = next(one for one in module.AsyncCompile.__mro__ if one.__module__ == module.__name__)

    def write(on: bool) -> None:
        module.AsyncCompile = _joining(usual) if on else usual

    return {JOINED: Switch(lambda: module.AsyncCompile is _joining(usual), write, (True,))}

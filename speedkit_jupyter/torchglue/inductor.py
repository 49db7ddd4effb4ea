"""Inductor's private names: its settings, its code caches, its C++ kernels, its search hooks.

Comments give the versions of torch in which a name was seen, and the effect without it. Each is
called in `tests/torchglue/test_inductor.py`. Nothing is imported before it is used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

from speedkit_jupyter.torchglue.dynamo import COMPILERS
from speedkit_jupyter.torchglue.private import cached_functions, found

_HOME = COMPILERS[1]
INDUCTOR_CONFIG = f"{_HOME}.config"

# 2.9, 2.11, 2.13. Without it, setting up the caches of compiled code raises ImportError.
inductor_config = partial(import_module, INDUCTOR_CONFIG)
_codecache = partial(import_module, f"{_HOME}.codecache")
# 2.9, 2.11, 2.13: the module in which generated code builds its C++ kernels by `AsyncCompile`; None
# while it is not loaded. Without it, each kernel of a graph is compiled by itself.
kernel_builder: Callable[[], Any] = partial(sys.modules.get, f"{_HOME}.async_compile")


def usual_cache_folder() -> str:
    """Return the folder that Inductor writes into its environment variable where it is unset.

    Empty while Inductor is not loaded.
    """
    # 2.9, 2.11, 2.13. Without it, the folder counts as one that the user has set.
    module = sys.modules.get(f"{_HOME}.runtime.cache_dir_utils")
    usual = getattr(module, "default_cache_dir", None)
    return "" if usual is None else str(usual())


def is_forward_of_training() -> bool:
    """Return whether Inductor compiles a forward pass, and its backward pass is next."""
    # 2.9, 2.11, 2.13. Without it, AttributeError is raised while joined kernels are built.
    graph = found(f"{_HOME}.virtualized", "V").graph
    return not (getattr(graph, "is_backward", True) or getattr(graph, "is_inference", True))


# C++ kernels. 2.9, 2.11, 2.13. Without these classes kernels are not joined, and a failed build is
# remembered for the rest of the process.


def forget_builds() -> None:
    """Have Inductor look anew for libraries and instructions that it remembers as failed.

    A killed probe of the vector instructions is remembered as "there are none".
    """
    built = _codecache()
    built.CppCodeCache.cache_clear()
    built.CppPythonBindingsCodeCache.cache_clear()
    forget_instructions()


def with_bindings(types: Sequence[str], code: str) -> str:
    """Return a kernel's code with the code by which Python calls it: a module named `kernel`."""
    kind, codes = _codecache().CppPythonBindingsCodeCache, list[str]()
    note = classmethod(lambda cls, code, *_, **__: codes.append(code))
    noting: Any = type("Noting", (kind,), {"load_async": note})
    noting.load_pybinding_async(types, code)
    return codes[0]


def kernel_library(code: str) -> Callable[[], Any]:
    """Begin to build a library unless it exists; return a function that waits and loads it."""
    has_threads = (inductor_config().compile_threads or 1) > 1
    submit = kernel_builder().AsyncCompile.submit if has_threads else None
    return _codecache().CppPythonBindingsCodeCache.load_async(code, submit_fn=submit)  # type: ignore[no-any-return]


@contextmanager
def compiled_code_noted() -> Iterator[Callable[[], tuple[bytes, list[str]]]]:
    """Note the code that is compiled, or found in caches, inside the block alone.

    Yields a function that returns the artifacts, as `torch.compiler.save_cache_artifacts()` does,
    and the names of the C++ libraries, which the artifacts leave out.
    """
    import torch

    # 2.9, 2.11, 2.13. Without it, a search stores no bundle: later processes compile anew.
    manager: Any = found("torch.compiler._cache", "CacheArtifactManager")
    built = _codecache()
    kinds = (built.CppCodeCache, built.CppPythonBindingsCodeCache)
    for kind in kinds:  # a library that is loaded anew is noted anew
        kind.cache_clear()

    def noted() -> tuple[bytes, list[str]]:
        saved = torch.compiler.save_cache_artifacts()
        return saved[0] if saved else b"", [key for kind in kinds for key in kind.cache]

    with manager.with_fresh_cache():
        yield noted


# Vector instructions. 2.9, 2.11, 2.13. Without these, AttributeError at the first compiled call, or
# Inductor probes the C++ compiler for seconds in each process.


def instruction_probes() -> tuple[list[str], list[str]]:
    """Return Inductor's test programs for this CPU's vector instructions, and compiler options.

    Both are empty for a CPU other than x86. From then on Inductor takes the instructions for known,
    until `forget_instructions()`.
    """
    vectors, code = import_module(f"{_HOME}.cpu_vec_isa"), list[str]()
    if not vectors.x86_isa_checker():
        return [], []

    def passes(_: Any, text: str) -> bool:
        code.append(text)
        return True

    usual = vectors.VecISA.check_build
    vectors.VecISA.check_build = passes
    try:  # without torch's own headers, which take seconds
        with inductor_config().patch({"cpp.vec_isa_ok": True}):
            vectors.pick_vec_isa()
    finally:
        vectors.VecISA.check_build = usual
    return code, [one.build_arch_flags() for one in vectors.valid_vec_isa_list()]


def forget_instructions() -> None:
    """Have Inductor ask the compiler anew which vector instructions it knows."""
    vectors = import_module(f"{_HOME}.cpu_vec_isa")
    known: Sequence[Any] = vectors.supported_vec_isa_list
    kinds = {kind for one in known for kind in type(one).__mro__}
    for cache in (cache for owner in (vectors, *kinds) for cache in cached_functions(owner)):
        cache.cache_clear()
    for one in known:
        for name in [name for name in vars(one) if "is_" in name]:
            delattr(one, name)


# max-autotune: Inductor's own hooks around the search for the fastest kernel. 2.9, 2.11, 2.13.
# Without them, `autotune` is off and says which name is missing.


def on_autotuning(
    choose: Callable[[list[Any]], list[Any]], measured: Callable[..., None]
) -> Callable[[], None]:
    """Let `choose` pick the kernels to time, and give `measured` the timings.

    Returns a function that ends this. Raises AttributeError or ImportError in a torch without these
    hooks.
    """
    module = import_module(f"{_HOME}.select_algorithm")
    cache = module.get_algorithm_selector_cache()
    hooks = ((cache.preprocessing_fns, choose), (cache.feedback_saver_fns, measured))
    module.add_preprocessing_fn(choose)
    module.add_feedback_saver(measured)

    def remove() -> None:
        for every, hook in hooks:
            if hook in every:
                every.remove(hook)

    return remove


def is_library_kernel(choice: Any) -> bool:
    """Return whether a kernel on offer is a library's, not one that Inductor generates."""
    return isinstance(choice, found(f"{_HOME}.select_algorithm", "ExternKernelCaller"))


# 2.9, 2.11, 2.13: Inductor's names for MKL's and oneDNN's linear layer. Without them, these kernels
# are not among the library's that are predicted.
MKL_KERNEL, ONEDNN_KERNEL = "_mkl_linear", "_linear_pointwise"

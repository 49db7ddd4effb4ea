"""Inductor's private names: its settings, its code caches, its C++ kernels, its search hooks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from speedkit_jupyter.torchglue.dynamo import COMPILERS
from speedkit_jupyter.torchglue.private import cached_functions, found

_HOME = COMPILERS[1]
INDUCTOR_CONFIG = f"{_HOME}.config"

inductor_config = partial(import_module, INDUCTOR_CONFIG)
_codecache = partial(import_module, f"{_HOME}.codecache")
# The module in which generated code builds its C++ kernels by `AsyncCompile`; None while it is not
# loaded. Without it, each kernel of a graph is compiled by itself.
kernel_builder: Callable[[], Any] = partial(sys.modules.get, f"{_HOME}.async_compile")
# Inductor's names for MKL's and oneDNN's linear layer. Without them, these kernels are not among
# the library's that are predicted.
MKL_KERNEL, ONEDNN_KERNEL = "_mkl_linear", "_linear_pointwise"


def usual_cache_folder() -> str:
    """Return the folder that Inductor writes into its unset variable; empty until it is loaded."""
    # Without it, the folder counts as one that the user has set.
    module = sys.modules.get(f"{_HOME}.runtime.cache_dir_utils")
    usual = getattr(module, "default_cache_dir", None)
    return "" if usual is None else str(usual())


# --- C++ kernels ---


def forget_builds() -> None:
    """Have Inductor search again for libraries and instructions that it remembers as failed."""
    built, vectors = _codecache(), import_module(f"{_HOME}.cpu_vec_isa")
    known: Sequence[Any] = vectors.supported_vec_isa_list
    kinds = {kind for one in known for kind in type(one).__mro__}
    caches = [one for owner in (vectors, *kinds) for one in cached_functions(owner)]
    for cache in (built.CppCodeCache, built.CppPythonBindingsCodeCache, *caches):
        cache.cache_clear()
    for one in known:
        for name in [name for name in vars(one) if "is_" in name]:
            delattr(one, name)


def instruction_options() -> list[str]:
    """Return the compiler's options for this CPU's vector instructions; none unless it is x86."""
    vectors = import_module(f"{_HOME}.cpu_vec_isa")
    here = vectors.x86_isa_checker()
    every = [one for one in vectors.supported_vec_isa_list if {*str(one).split()} <= {*here}]
    return " ".join(one.build_arch_flags() for one in every).split()


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


# --- the search of max-autotune ---


def on_autotuning(
    choose: Callable[[list[Any]], list[Any]], measured: Callable[..., None]
) -> Callable[[], None]:
    """Let `choose` pick the kernels to time, and give `measured` the timings.

    Returns a function that ends this. Raises AttributeError or ImportError without these hooks.
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

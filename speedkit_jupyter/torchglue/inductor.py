"""Use Inductor's private names: settings, code caches, C++ kernels and autotuning hooks."""

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
# Returns the module whose `AsyncCompile` builds a graph's C++ kernels; None if it is not loaded.
# If torch renames the module, each kernel of a graph is compiled separately.
kernel_builder: Callable[[], Any] = partial(sys.modules.get, f"{_HOME}.async_compile")
# Inductor's names for MKL's and oneDNN's linear kernels. If torch renames them, choices of these
# kernels are not predicted.
MKL_KERNEL, ONEDNN_KERNEL = "_mkl_linear", "_linear_pointwise"


def usual_cache_folder() -> str:
    """Return Inductor's default cache folder; empty until Inductor is loaded."""
    # If torch renames the function, the default folder counts as set by the user.
    module = sys.modules.get(f"{_HOME}.runtime.cache_dir_utils")
    usual = getattr(module, "default_cache_dir", None)
    return "" if usual is None else str(usual())


# --- C++ kernels ---


def forget_builds() -> None:
    """Clear Inductor's caches of C++ libraries and instruction sets, to retry failed builds."""
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
    """Return compiler options for this CPU's vector instructions; empty unless the CPU is x86."""
    vectors = import_module(f"{_HOME}.cpu_vec_isa")
    here = vectors.x86_isa_checker()
    every = [one for one in vectors.supported_vec_isa_list if {*str(one).split()} <= {*here}]
    return " ".join(one.build_arch_flags() for one in every).split()


def with_bindings(types: Sequence[str], code: str) -> str:
    """Return a kernel's code with its Python bindings, as the source of a module named `kernel`."""
    kind, codes = _codecache().CppPythonBindingsCodeCache, list[str]()
    note = classmethod(lambda cls, code, *_, **__: codes.append(code))
    noting: Any = type("Noting", (kind,), {"load_async": note})
    noting.load_pybinding_async(types, code)
    return codes[0]


def kernel_library(code: str) -> Callable[[], Any]:
    """Return a function that builds and loads a library. Compile threads, if any, start now."""
    has_threads = (inductor_config().compile_threads or 1) > 1
    submit = kernel_builder().AsyncCompile.submit if has_threads else None
    return _codecache().CppPythonBindingsCodeCache.load_async(code, submit_fn=submit)  # type: ignore[no-any-return]


# --- max-autotune ---


def on_autotuning(
    choose: Callable[[list[Any]], list[Any]], measured: Callable[..., None]
) -> Callable[[], None]:
    """Have Inductor call `choose` to select kernels to time, and `measured` with the timings.

    Return a function that removes both. Raises AttributeError or ImportError if torch lacks a hook.
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
    """Return whether a candidate kernel comes from a library, not from Inductor."""
    return isinstance(choice, found(f"{_HOME}.select_algorithm", "ExternKernelCaller"))

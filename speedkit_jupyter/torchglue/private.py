"""torch's private names: what it does not promise, in one place.

Tested on torch 2.9, 2.11 and 2.13 (`make versions`): `tests/support/test_torch_private.py` lists
the names, calls each, and allows none elsewhere. All these versions have all of them, unless a line
says otherwise. Where torch has moved one, `moved` tells which: the entry of the catalog that needs
it is declined, and anything else raises the AttributeError or ImportError.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# The packages of torch.compile, which write caches of their own.
COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch")
DYNAMO_CONFIG, INDUCTOR_CONFIG = CONFIGS = [f"{home}.config" for home in COMPILERS[:2]]
# Modules that import most of them, in parts of at most half a second or so.
COMPILER_PARTS = (
    "sympy",
    f"{COMPILERS[0]}.utils",
    f"{COMPILERS[2]}.aot_autograd",
    f"{COMPILERS[1]}.lowering",
    f"{COMPILERS[1]}.compile_fx",
)


def moved(error: BaseException) -> str:
    """Return what torch does not have (any more), if that is what the error says; else empty."""
    name = str(getattr(error, "name", None) or "")
    if isinstance(error, ImportError):
        asked = getattr(error, "name_from", None)
        return ".".join(filter(None, (name, asked))) if f"{name}.".startswith("torch.") else ""
    if not isinstance(error, AttributeError) or error.obj is None:
        return ""
    owner = error.obj if hasattr(error.obj, "__name__") else type(error.obj)
    module = getattr(owner, "__module__", None) or owner.__name__
    return f"{owner.__name__}.{name}" if f"{module}.".startswith("torch.") else ""


def _found(home: str, name: str) -> Any:
    return getattr(sys.modules.get(home) or import_module(home), name)


def _function(home: str, name: str) -> Callable[..., Any]:
    """Return torch's function, looked up when it is called: this module loads nothing."""
    return lambda *args, **kwargs: _found(home, name)(*args, **kwargs)


C, AUTOGRAD, FUNCTORCH = "torch._C", "torch._C._autograd", "torch._C._functorch"
PYTREE, DISPATCH = "torch.utils._pytree", "torch.utils._python_dispatch"


def linear_by_onednn() -> Callable[..., torch.Tensor]:
    """Return oneDNN's float32 product of two matrices; AttributeError in a build without oneDNN."""
    import torch

    return torch.ops.mkldnn._linear_pointwise.default  # type: ignore[no-any-return]


def leave_uncompiled(function: Callable[..., Any]) -> None:
    """Have torch.compile run this function, and what it calls, as it is, at no cost for a call.

    `torch.compiler.disable` wraps it, which takes a microsecond a call.
    """
    frames: Any = _found(C, "_dynamo").eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))  # type: ignore[attr-defined]


# The product of two int8 matrices in int32, as torchao's layers call it.
int8_product = _function("torch", "_int_mm")

# The order in which attention kernels are tried, as numbers of SDPBackend; the public `sdpa_kernel`
# sets it for a block only.
attention_order = _function(C, "_get_sdp_priority_order")
set_attention_order = _function(C, "_set_sdp_priority_order")

# The settings of CUDA's allocator, as text: since 2.10.
allocator_settings = _function(C, "_accelerator_getAllocatorSettings")
set_allocator_settings = _function(C, "_accelerator_setAllocatorSettings")


def has_allocator_settings() -> bool:
    return hasattr(import_module(C), "_accelerator_getAllocatorSettings")


def users_of_storage(tensor: torch.Tensor) -> int:
    """Return how many tensors refer to its memory, some of torch's own with them."""
    return int(_found(C, "_storage_Use_Count")(tensor.untyped_storage()._cdata))


# Containers as torch's own transformations see them; there is no public name.
tree_leaves = _function(PYTREE, "tree_leaves")
tree_map = _function(PYTREE, "tree_map")
tree_flatten = _function(PYTREE, "tree_flatten")
tree_unflatten = _function(PYTREE, "tree_unflatten")

tree_flatten = _function(PYTREE, "tree_flatten")


def script_attributes(module: Any) -> dict[str, Any]:
    """Return what a TorchScript module keeps in C++: parameters, buffers, attributes."""
    if (inner := vars(module).get("_c")) is None:  # a traced one, which holds another
        return {}
    kind = _found(C, "ConcreteModuleType").from_jit_type(inner._type())
    return {name: inner.getattr(name) for name in kind.get_attributes()}


def set_script_attribute(module: Any, name: str, value: Any) -> None:
    vars(module)["_c"].setattr(name, value)


def script_constants(scripted: Any) -> list[Any]:
    """Return the tensors in the code of a TorchScript function, or of a module's methods."""
    inner, code = getattr(scripted, "_c", None), [scripted]
    if inner is not None:
        code = [inner._get_method(name) for name in inner._method_names()]
    nodes = [node for one in code for node in one.graph.findAllNodes("prim::Constant")]
    return [n.t("value") for n in nodes if n.hasAttribute("value") and n.kindOf("value") == "t"]


def global_hooks() -> list[dict[Any, Any]]:
    """Return the hooks on the calls of all modules, and on the steps of all optimizers."""
    homes = map(import_module, ("torch.nn.modules.module", "torch.optim.optimizer"))
    every = [pair for home in homes for pair in vars(home).items()]
    return [one for name, one in every if name.startswith("_global_") and isinstance(one, dict)]


# Modes: having none of those that see every operation, and the innermost of those that see torch's
# functions.
without_dispatch_modes = _function(DISPATCH, "_disable_current_modes")
innermost_function_mode = _function("torch.overrides", "_get_current_function_mode")
# Returns the class of those that see every operation.
dispatch_mode = partial(_found, DISPATCH, "TorchDispatchMode")


@contextmanager
def dispatch_modes_put_back() -> Iterator[None]:
    """End those that the block leaves on: their own end fails at Python's limit of recursion."""
    modes, pop = (
        _found(DISPATCH, one) for one in ("_get_current_dispatch_mode_stack", "_pop_mode")
    )
    before = len(modes())
    try:
        yield
    finally:
        while len(modes()) > before:
            try:
                modes()[-1].__exit__(None, None, None)
            except IndexError:  # it got as far as that
                pop()


# Tensors whose values are those of tensors in their attributes, and those of `torch.func`.
is_made_of_tensors = _function(DISPATCH, "is_traceable_wrapper_subclass")
is_transformed = _function(FUNCTORCH, "is_functorch_wrapped_tensor")


def is_transforming() -> bool:
    """Return whether `vmap`, `grad` or another of `torch.func`'s transforms is at work."""
    return _found(FUNCTORCH, "peek_interpreter_stack")() is not None


# Autograd: whether a profiler is at work, the number that the next node of the graph gets, the node
# whose backward pass is computed in this thread (None outside of one), whether hooks on what is
# kept are allowed here.
is_profiled = _function(AUTOGRAD, "_profiler_enabled")
sequence_number = _function(AUTOGRAD, "_get_sequence_nr")
current_node = _function(C, "_current_autograd_node")
can_hook_saved_tensors = _function(AUTOGRAD, "_saved_tensors_hooks_is_enabled")


def set_versions(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """Set how often tensors count as written: an earlier graph compares this with the value then.

    Only for tensors that hold their values of then again.
    """
    _found(AUTOGRAD, "_unsafe_set_version_counter")(tuple(tensors), tuple(versions))


def version(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written to; 0 where torch does not count that."""
    return 0 if tensor.is_inference() else tensor._version


def forget_sharding(module: torch.nn.Module) -> None:
    """Let `fully_shard` take a module again, which it has made parts of once."""
    _found("torch.distributed._composable_state", "_module_state_mapping").pop(module, None)


# Returns the class of what a DataLoader's loop draws from.
loader_iterator = partial(_found, "torch.utils.data.dataloader", "_BaseDataLoaderIter")


def end_workers(iterator: Any) -> None:
    """End the workers of a DataLoader's iterator, if it has some, as its destructor does."""
    if isinstance(iterator, loader_iterator()):
        getattr(iterator, "__del__", lambda: None)()


# torch.compile. `torch.compiler.config` has some of Dynamo's settings only.
dynamo_config, inductor_config = (partial(import_module, one) for one in CONFIGS)
inductor_codecache = partial(import_module, f"{COMPILERS[1]}.codecache")


def lookups() -> list[Any]:
    """Return the caches by which torch finds the functions that modes see, as far as loaded."""
    modules = map(sys.modules.get, ("torch.overrides", f"{COMPILERS[0]}.trace_rules"))
    return [one for module in modules if module for one in _caches(module)]


def _caches(owner: Any) -> list[Any]:
    return [one for one in vars(owner).values() if hasattr(one, "cache_clear")]


# Returns Dynamo's counts of this process.
compile_counters = partial(_found, f"{COMPILERS[0]}.utils", "counters")


def compilations() -> Sequence[Any]:
    """Return what Dynamo noted of its latest compilations; none while it is not loaded."""
    utils: Any = sys.modules.get(f"{COMPILERS[0]}.utils")
    return () if utils is None else utils.get_compilation_metrics()


def guard_failures(first: str) -> list[str]:
    """Return why each graph did not serve a call, of which `recompile_reason` has the first."""
    utils: Any = sys.modules.get(f"{COMPILERS[0]}.utils")
    for reasons in getattr(utils, "guard_failures", {}).values():
        if first in reasons:
            since = reasons[len(reasons) - 1 - reasons[::-1].index(first) :]
            return list({one.partition(":")[0]: one for one in reversed(since)}.values())[::-1]
    return [first]


def graph_breaks() -> Sequence[Any]:
    """Return the `reason` and the `user_stack` of each graph break; none without Dynamo."""
    utils: Any = sys.modules.get(f"{COMPILERS[0]}.utils")
    return () if utils is None else utils.graph_break_reasons  # type: ignore[no-any-return]


def compiled_from(function: Any) -> Any:
    """Return the function that `torch.compile` was given; None for what it did not make."""
    return getattr(function, "_torchdynamo_orig_callable", None)


def eager_backward() -> tuple[Any, dict[str, bool]]:
    """Return the config and the settings by which a backward pass is compiled with the forward
    pass, if torch has them. `retain_graph=True` is not known then: no buffer may be donated.
    """
    config = import_module(f"{COMPILERS[2]}.config")
    settings = {"force_non_lazy_backward_lowering": True, "donated_buffer": False}
    return config, settings if all(hasattr(config, name) for name in settings) else {}


def is_dynamo_loaded() -> bool:
    return f"{COMPILERS[0]}.callback" in sys.modules


def on_compiling(start: Callable[[Any], None], end: Callable[[Any], None]) -> Callable[[], None]:
    """Call these around each compilation; returns what ends that. torch's own reset ends it too."""
    handler = _found(f"{COMPILERS[0]}.callback", "callback_handler")
    handler.register_start_callback(start)
    handler.register_end_callback(end)

    def remove() -> None:
        if start in handler.start_callbacks:
            handler.remove_start_callback(start)
            handler.remove_end_callback(end)

    return remove


def is_compiler_error(error: BaseException) -> bool:
    """Return whether torch.compile has failed, or its code can't compute gradients of gradients."""
    is_second = "double backward" in str(error)
    return is_second or any(base.__module__.startswith(COMPILERS) for base in type(error).__mro__)


def cause(error: BaseException) -> BaseException:
    """Return what a compiler's error comes from; of a failed C++ compiler what that has printed."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    printed = getattr(error, "output", None) or b""
    lines = printed.decode(errors="replace").splitlines() if isinstance(printed, bytes) else []
    said = next((line for line in lines if "error:" in line or "failed:" in line), None)
    return error if said is None else RuntimeError(said.strip())


def users_lines(error: BaseException) -> list[tuple[str, int]]:
    """Return the file and number of each line that a compiler's error names, innermost first."""
    stack = getattr(error, "real_stack", None) or ()
    return [(frame.filename, frame.lineno) for frame in reversed(stack)]


def lacks_compiler(error: BaseException) -> bool:
    """Return whether there is no compiler, or no Triton, for what Inductor generates."""
    names = {"InvalidCxxCompiler", "TritonMissing", "GPUTooOldForTriton"}
    return type(cause(error)).__name__ in names


def forget_builds() -> None:
    """Have Inductor look anew for libraries and instructions that it remembers as failed.

    A killed probe of the vector instructions is remembered as "there are none".
    """
    built = inductor_codecache()
    built.CppCodeCache.cache_clear()
    built.CppPythonBindingsCodeCache.cache_clear()
    forget_instructions()


# max-autotune: Inductor's own hooks around the search for the fastest kernel.


def on_autotuning(
    choose: Callable[[list[Any]], list[Any]], measured: Callable[..., None]
) -> Callable[[], None]:
    """Let `choose` say which kernels are timed, and give `measured` the timings; returns what ends
    that. Raises AttributeError or ImportError in a torch without these hooks.
    """
    module = import_module(f"{COMPILERS[1]}.select_algorithm")
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
    return isinstance(choice, _found(f"{COMPILERS[1]}.select_algorithm", "ExternKernelCaller"))


def usual_cache_folder() -> str:
    """Return the folder that Inductor writes into its variable where nobody has, once loaded."""
    found = sys.modules.get(f"{COMPILERS[1]}.runtime.cache_dir_utils")
    usual = getattr(found, "default_cache_dir", None)
    return "" if usual is None else str(usual())


def instruction_probes() -> tuple[list[str], list[str]]:
    """Return the code by which Inductor asks whether the compiler knows this CPU's vector
    instructions, and the compiler's options for them: of an x86 CPU. From then on it takes them for
    known, until `forget_instructions()`.
    """
    vectors, code = import_module(f"{COMPILERS[1]}.cpu_vec_isa"), list[str]()
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
    vectors = import_module(f"{COMPILERS[1]}.cpu_vec_isa")
    known: Sequence[Any] = vectors.supported_vec_isa_list
    kinds = {kind for one in known for kind in type(one).__mro__}
    for cache in (cache for owner in (vectors, *kinds) for cache in _caches(owner)):
        cache.cache_clear()
    for one in known:
        for name in [name for name in vars(one) if "is_" in name]:
            delattr(one, name)


def import_compiler() -> None:
    """Import most of the compiler, so that its first graph does not wait for that."""
    for name in COMPILER_PARTS:
        import_module(name)


# The C++ kernels of a graph: generated code makes an object of `AsyncCompile` in the module that
# this returns, None while it is not loaded.
kernel_builder: Callable[[], Any] = partial(sys.modules.get, f"{COMPILERS[1]}.async_compile")


def with_bindings(types: Sequence[str], code: str) -> str:
    """Return a kernel's code with the code by which Python calls it: a module named `kernel`."""
    kind, found = inductor_codecache().CppPythonBindingsCodeCache, list[str]()
    note = classmethod(lambda cls, code, *_, **__: found.append(code))
    noting: Any = type("Noting", (kind,), {"load_async": note})
    noting.load_pybinding_async(types, code)
    return found[0]


def kernel_library(code: str) -> Callable[[], Any]:
    """Begin to build a library unless it is there; return what waits for it and loads it."""
    has_threads = (inductor_config().compile_threads or 1) > 1
    submit = kernel_builder().AsyncCompile.submit if has_threads else None
    return inductor_codecache().CppPythonBindingsCodeCache.load_async(code, submit_fn=submit)  # type: ignore[no-any-return]


def is_forward_of_training() -> bool:
    """Return whether Inductor compiles a forward pass, and its backward pass is next."""
    graph = _found(f"{COMPILERS[1]}.virtualized", "V").graph
    return not (getattr(graph, "is_backward", True) or getattr(graph, "is_inference", True))


@contextmanager
def compiled_code_noted() -> Iterator[Callable[[], tuple[bytes, list[str]]]]:
    """Note what is compiled, or found in caches, inside the block alone. Gives what returns it: as
    `save_cache_artifacts()` does, and the names of the C++ libraries, which that leaves out.
    """
    import torch

    manager: Any = _found("torch.compiler._cache", "CacheArtifactManager")
    built = inductor_codecache()
    kinds = (built.CppCodeCache, built.CppPythonBindingsCodeCache)
    for kind in kinds:  # what is loaded anew is noted anew
        kind.cache_clear()

    def noted() -> tuple[bytes, list[str]]:
        saved = torch.compiler.save_cache_artifacts()
        return saved[0] if saved else b"", [key for kind in kinds for key in kind.cache]

    with manager.with_fresh_cache():
        yield noted

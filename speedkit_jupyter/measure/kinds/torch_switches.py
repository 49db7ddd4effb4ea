"""torch's switches: what changes how a step computes, and what it may set beside."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from speedkit_jupyter import flags
from speedkit_jupyter.measure.kinds.settings import (
    Known,
    Setting,
    attribute,
    calls,
    contents,
    is_same,
    owner_of,
)

C = "torch._C"
# How it is called, the module, what reads and what writes it. Of how a step computes.
COMPUTING = (
    ("grad mode", "torch", "is_grad_enabled", "set_grad_enabled"),
    ("multithreaded backward", C, "_is_multithreading_enabled", "_set_multithreading_enabled"),
    ("view replay", C, "_is_view_replay_enabled", "_set_view_replay_enabled"),
    ("mha's fast path", "torch.backends.mha", "get_fastpath_enabled", "set_fastpath_enabled"),
    ("nnpack", C, "_get_nnpack_enabled", "_set_nnpack_enabled"),
    ("JIT optimization", C, "_get_graph_executor_optimize", "_set_graph_executor_optimize"),
    ("JIT's CPU fuser", C, "_jit_can_fuse_on_cpu", "_jit_override_can_fuse_on_cpu"),
    ("JIT's GPU fuser", C, "_jit_can_fuse_on_gpu", "_jit_override_can_fuse_on_gpu"),
    ("JIT's expression fuser", C, "_jit_texpr_fuser_enabled", "_jit_set_texpr_fuser_enabled"),
    ("checks of sparse tensors", C, "_check_sparse_tensor_invariants",
     "_set_check_sparse_tensor_invariants"),
    *(
        (f"the preferred {name}", "torch.backends.cuda", f"preferred_{name}", f"preferred_{name}")
        for name in ("linalg_library", "blas_library", "rocm_fa_library")
    ),
)  # fmt: skip
# Of which module, and their names; cudnn's and its like are checked by their own setters.
COMPUTING_ATTRIBUTES = {
    "torch.backends.cudnn": "enabled benchmark_limit",
    "torch.backends.mkldnn": "enabled deterministic",
    "torch.backends.opt_einsum": "enabled strategy",
    "torch.backends.quantized": "engine",
    "torch.backends.miopen": "immediate",
    "torch.backends.cuda:matmul": "allow_fp16_accumulation",
    "torch.utils.deterministic": "fill_uninitialized_memory",
    "torch.utils.checkpoint": "_enable_checkpoint_early_stop _checkpoint_debug_enabled",
    "torch.utils.checkpoint:DefaultDeviceType": "_default_device_type",
    "torch.nn.utils.parametrize": "_cache_enabled",
    "torch._dynamo.eval_frame": "_stance",
}
# Hooks that every module and every optimizer runs.
HOOKS = {
    "torch.nn.modules.module": (
        "_global_forward_pre_hooks _global_forward_hooks _global_forward_hooks_always_called "
        "_global_backward_pre_hooks _global_backward_hooks _global_buffer_registration_hooks "
        "_global_module_registration_hooks _global_parameter_registration_hooks "
        "_global_forward_hooks_with_kwargs"
    ),
    "torch.optim.optimizer": "_global_optimizer_pre_hooks _global_optimizer_post_hooks",
    "torch.nn.utils.parametrize": "_cache",
}

FUTURE = "torch.__future__"
SAVING = "torch.serialization"
BESIDE = (
    ("warn_always", "torch", "is_warn_always_enabled", "set_warn_always"),
    ("overwrite_module_params_on_conversion", FUTURE, "get_overwrite_module_params_on_conversion",
     "set_overwrite_module_params_on_conversion"),
    ("swap_module_params_on_conversion", FUTURE, "get_swap_module_params_on_conversion",
     "set_swap_module_params_on_conversion"),
    ("endianness of files", SAVING, "get_default_load_endianness", "set_default_load_endianness"),
    ("checksums of files", SAVING, "get_crc32_options", "set_crc32_options"),
    ("mmap options", SAVING, "get_default_mmap_options", "set_default_mmap_options"),
    ("the sharing strategy", "torch.multiprocessing", "get_sharing_strategy",
     "set_sharing_strategy"),
)  # fmt: skip
BESIDE_ATTRIBUTES = {
    "torch.hub": "_hub_dir",
}
# Registries: an import may add to them, else what code spells that does it itself.
REGISTRIES = (
    ("torch.serialization", "_package_registry", "register_package"),
    ("torch._weights_only_unpickler", "_marked_safe_globals_set", "add_safe_globals safe_globals"),
    ("torch.utils._pytree", "SUPPORTED_NODES", "register_pytree_node"),
    ("torch.utils._pytree", "SUPPORTED_SERIALIZED_TYPES", "register_pytree_node"),
    ("torch.utils._pytree", "SERIALIZED_TYPE_TO_PYTHON_TYPE", "register_pytree_node"),
    ("torch.utils.data._utils.collate", "default_collate_fn_map", "default_collate_fn_map"),
    ("torch.distributions.kl", "_KL_REGISTRY", "register_kl"),
    ("torch.distributions:biject_to", "_registry", "biject_to"),
    ("torch.distributions:transform_to", "_registry", "transform_to"),
)
LOGGING = "torch._logging._internal:log_state"


def computing() -> Iterator[Setting]:
    """What changes how a step computes: put back between rounds, too."""
    import torch

    yield Setting("torch's switches", lambda: Known(flags.snapshot()), flags.restore)
    yield Setting("default device", _default_device, torch.set_default_device)
    yield Setting(
        "deterministic algorithms",
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    )
    yield Setting(
        "anomaly mode",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.autograd.set_detect_anomaly(*value),
    )
    yield Setting("flush_denormal", _flushes_denormals, torch.set_flush_denormal)
    yield from (calls(*row) for row in COMPUTING)
    for path, names in COMPUTING_ATTRIBUTES.items():
        yield from (attribute(path, name) for name in names.split())
    for path, names in HOOKS.items():
        yield from (contents(path, name) for name in names.split())
    yield Setting("hooks of saved tensors", _saved_tensors, _write_saved_tensors)
    yield Setting(
        "hooks of saved tensors, allowed",
        torch._C._autograd._saved_tensors_hooks_get_disabled_error_message,
        _allow_saved_tensors,
    )
    yield Setting("function modes", _function_modes, _write_function_modes)
    yield Setting("dispatch modes", _dispatch_modes, _write_dispatch_modes)
    yield Setting("forward-mode levels", _levels, _leave_levels)


def beside() -> Iterator[Setting]:
    """What a step may set beside: put back once, at the end."""
    import torch

    yield from (calls(*row) for row in BESIDE)
    for path, names in BESIDE_ATTRIBUTES.items():
        yield from (attribute(path, name) for name in names.split())
    yield Setting("printing of tensors", _print_options, _write_print_options)
    yield attribute(
        "torch.distributions:Distribution", "_validate_args", "set_default_validate_args"
    )
    yield from (contents(*row) for row in REGISTRIES)
    yield contents(LOGGING, "log_qname_to_level", "set_logs", "torch._logging.set_logs")
    yield contents(LOGGING, "artifact_names", "set_logs", "artifacts of torch._logging")
    words = "library Library custom_op register_kernel impl define"
    yield Setting("operators of torch.library", lambda: set(torch.library._defs), None, words)
    yield Setting("kernels of torch.library", lambda: set(torch.library._impls), None, words)
    yield Setting("compiler settings", _configs, _write_configs, "config")
    yield Setting("threads between operators", torch.get_num_interop_threads, None)
    yield Setting("inference mode", torch.is_inference_mode_enabled, None)
    yield Setting("torch's profiler", torch._C._autograd._profiler_enabled, None)
    yield Setting("torch.distributed", torch.distributed.is_initialized, None)
    if torch.cuda.is_initialized():
        yield Setting("the current GPU", torch.cuda.current_device, torch.cuda.set_device)
        yield Setting("the current stream", torch.cuda.current_stream, torch.cuda.set_stream)
        yield Setting(
            "cuda's sync debug mode",
            torch.cuda.get_sync_debug_mode,
            torch.cuda.set_sync_debug_mode,
        )


def _flushes_denormals() -> bool:
    """It can't be asked, but it shows."""
    import torch

    return bool((torch.full((1,), 1e-310, dtype=torch.float64) * 1.0).item() == 0.0)


def _default_device() -> Any:
    """None where nothing was set: then torch's functions are not wrapped."""
    import torch

    mode = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if mode is None else mode.device


def _print_options() -> dict[str, Any]:
    return dict(vars(owner_of("torch._tensor_str").PRINT_OPTS))


def _write_print_options(value: dict[str, Any]) -> None:
    vars(owner_of("torch._tensor_str").PRINT_OPTS).update(value)


def _saved_tensors() -> Any:
    import torch

    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _write_saved_tensors(value: Any) -> None:
    """Those on top of it are taken off."""
    import torch

    while (top := _saved_tensors()) is not None and not is_same(top, value):
        torch._C._autograd._pop_saved_tensors_default_hooks()


def _allow_saved_tensors(value: str | None) -> None:
    import torch

    if value is None:
        torch._C._autograd._saved_tensors_hooks_enable()
    else:
        torch._C._autograd._saved_tensors_hooks_disable(value)


def _function_modes() -> list[Any]:
    return list(owner_of("torch.overrides")._get_current_function_mode_stack())


def _write_function_modes(value: list[Any]) -> None:
    """Those that were entered and not left."""
    import torch

    while len(_function_modes()) > len(value):
        torch._C._pop_torch_function_stack()


def _dispatch_modes() -> list[Any]:
    return list(owner_of("torch.utils._python_dispatch")._get_current_dispatch_mode_stack())


def _write_dispatch_modes(value: list[Any]) -> None:
    while len(_dispatch_modes()) > len(value):
        owner_of("torch.utils._python_dispatch")._pop_mode()


def _levels() -> int:
    return int(owner_of("torch.autograd.forward_ad")._current_level)


def _leave_levels(value: int) -> None:
    while _levels() > value:
        owner_of("torch.autograd.forward_ad").exit_dual_level()


def _configs() -> Known:
    """What was set in modules of torch that hold settings as Dynamo's and Inductor's do."""
    names = [n for n in list(sys.modules) if n[-7:] == ".config" and n[:6] == "torch."]
    entries = {name: getattr(sys.modules[name], "_config", None) for name in names}
    return Known(
        {
            name: tuple(
                own.get() if type(own := entry.user_override) is ContextVar else own
                for entry in found.values()
            )
            for name, found in entries.items()
            if isinstance(found, dict)
        }
    )


def _write_configs(value: Known) -> None:
    now = _configs()
    for module, values in value.items():
        config: Any = sys.modules[module]
        for name, own, one in zip(config._config, values, now[module], strict=True):
            if is_same(own, one):
                continue
            entry = config._config[name]
            # By its own setter first, which notes that compiled code is out of date.
            setattr(config, name, entry.default if type(own) is object else own)
            if isinstance(entry.user_override, ContextVar):
                entry.user_override.set(own)
            else:
                entry.user_override = own

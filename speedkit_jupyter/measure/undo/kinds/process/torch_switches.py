"""torch's switches that change how a step computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from speedkit_jupyter.machines import flags
from speedkit_jupyter.measure.undo.kinds.settings import (
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


def _default_device() -> Any:
    """None where nothing was set: then torch's functions are not wrapped."""
    import torch

    mode = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if mode is None else mode.device


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
    """By torch's own exit, not a subclass's: beside the stack it keeps flags, by which
    torch.compile leaves all code as it is.
    """
    leave = owner_of("torch.utils._python_dispatch").TorchDispatchMode.__exit__
    while len(entered := _dispatch_modes()) > len(value):
        leave(entered[-1], None, None, None)


def _levels() -> int:
    return int(owner_of("torch.autograd.forward_ad")._current_level)


def _leave_levels(value: int) -> None:
    while _levels() > value:
        owner_of("torch.autograd.forward_ad").exit_dual_level()

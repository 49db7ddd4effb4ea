"""What a step may set in torch beside how it computes: its files, registries, compilers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from speedkit_jupyter.machines import devices
from speedkit_jupyter.measure.undo.kinds.settings import (
    Known,
    Setting,
    attribute,
    calls,
    contents,
    is_same,
    owner_of,
)

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
# The word that code has to spell which changes settings of Dynamo's and Inductor's itself.
COMPILER_SETTINGS = "config"
LOGGING = "torch._logging._internal:log_state"


def settings() -> Iterator[Setting]:
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
    yield Setting("compiler settings", _configs, _write_configs, COMPILER_SETTINGS)
    yield Setting("threads between operators", torch.get_num_interop_threads, None)
    yield Setting("inference mode", torch.is_inference_mode_enabled, None)
    yield Setting("torch's profiler", torch._C._autograd._profiler_enabled, None)
    yield Setting("torch.distributed", torch.distributed.is_initialized, None)
    for kind in devices.in_use():
        if kind.is_numbered:
            gpu = kind.module
            yield Setting(f"the current {kind.name} device", gpu.current_device, gpu.set_device)
            yield Setting(f"{kind.name}'s current stream", gpu.current_stream, gpu.set_stream)
    if torch.cuda.is_initialized():
        yield Setting(
            "cuda's sync debug mode",
            torch.cuda.get_sync_debug_mode,
            torch.cuda.set_sync_debug_mode,
        )


def _print_options() -> dict[str, Any]:
    return dict(vars(owner_of("torch._tensor_str").PRINT_OPTS))


def _write_print_options(value: dict[str, Any]) -> None:
    vars(owner_of("torch._tensor_str").PRINT_OPTS).update(value)


def _configs() -> Known:
    """What was set in modules of torch that hold settings as Dynamo's and Inductor's do."""
    names = [n for n in list(sys.modules) if n[-7:] == ".config" and n[:6] == "torch."]
    entries = {name: getattr(sys.modules[name], "_config", None) for name in names}
    return Known(
        {
            name: tuple(
                own.get() if type(own := entry.user_override) is ContextVar else own
                for entry in config.values()
            )
            for name, config in entries.items()
            if isinstance(config, dict)
        }
    )


def _write_configs(value: Known) -> None:
    now = _configs()
    for module, values in value.items():
        config: Any = sys.modules[module]
        for name, own, present in zip(config._config, values, now[module], strict=True):
            if is_same(own, present):
                continue
            entry = config._config[name]
            # By its own setter first, which notes that compiled code is out of date.
            setattr(config, name, entry.default if type(own) is object else own)
            if isinstance(entry.user_override, ContextVar):
                entry.user_override.set(own)
            else:
                entry.user_override = own

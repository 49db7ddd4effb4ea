"""Calls that change files without opening them, close them, reach other processes, or register
something for good, as the user's own code spells them.
"""

from __future__ import annotations

import dis
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from speedkit_jupyter.measure.undo.kinds.settings import owner_of

# Functions whose names say enough only together with their modules.
OF_OS = [
    "utime",
    "chmod",
    "fchmod",
    "lchmod",
    "chown",
    "fchown",
    "lchown",
    "chflags",
    "rename",
    "renames",
    "replace",
    "unlink",
    "remove",
    "mkdir",
    "makedirs",
    "rmdir",
    "removedirs",
    "symlink",
    "link",
    "truncate",
    "mkfifo",
    "mknod",
    "setxattr",
    "removexattr",
    "write",
    "pwrite",
    "writev",
    "pwritev",
    "ftruncate",
    "sendfile",
    "posix_fallocate",
    "copy_file_range",
    "splice",
    "eventfd_write",
    "set_blocking",
    "set_inheritable",
    "tcsetpgrp",
    "kill",
    "killpg",
    "popen",
    "fork",
    "forkpty",
    "posix_spawn",
    "posix_spawnp",
]
# Descriptors that the code itself opens it may close again.
OPENING = ["open", "pipe", "pipe2", "dup", "openpty", "memfd_create", "eventfd"]
CLOSING = ["close", "closerange", "dup2"]
# What is read from a pipe is gone; where a file is read goes back.
READING = ["read", "readv", "preadv", "eventfd_read"]
OF_SHUTIL = [
    "copyfile",
    "copyfileobj",
    "copymode",
    "copystat",
    "copy",
    "copy2",
    "copytree",
    "rmtree",
    "move",
    "chown",
    "make_archive",
    "unpack_archive",
]
# What takes in something that it can't be asked for, or does not give out again, and what another
# process or the other end of a connection sees.
LASTING = (
    ("atexit", "register"), ("codecs", "register"), ("codecs", "register_error"),
    ("subprocess", "run"), ("subprocess", "call"), ("subprocess", "check_call"),
    ("subprocess", "check_output"), ("subprocess", "getoutput"),
    ("subprocess", "getstatusoutput"), ("socket", "create_connection"),
    ("socket", "create_server"), ("signal", "raise_signal"), ("signal", "pthread_kill"),
    ("fcntl", "fcntl"), ("fcntl", "flock"), ("fcntl", "lockf"), ("fcntl", "ioctl"),
    ("termios", "tcsetattr"), ("termios", "tcflush"), ("termios", "tcsendbreak"),
)  # fmt: skip
# Methods of paths; those that other types have too count where the receiver may be a path.
OF_PATHS = frozenset(["unlink", "rmdir", "mkdir", "chmod", "lchmod", "symlink_to", "hardlink_to"])
AMBIGUOUS = frozenset(["rename", "replace", "touch", "move", "copy"])
GLOBALS, LOCALS = ("LOAD_GLOBAL", "LOAD_NAME"), ("LOAD_FAST", "LOAD_DEREF", "LOAD_CLASSDEREF")
STORES = ("STORE_FAST", "STORE_DEREF")
ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
UNKNOWN = object()


def changing_files(code: CodeType, space: Mapping[str, Any]) -> Iterator[str]:
    """`os.chmod`, `Path.rename`: names are looked up in `space`, the code's globals."""
    if not _candidates().isdisjoint(code.co_names) or _names_one(code, space):
        yield from _called(code, space)


def _called(code: CodeType, space: Mapping[str, Any]) -> Iterator[str]:
    instructions = list(dis.get_instructions(code))
    near_paths = _is_near_paths(code, space)
    value: Any = UNKNOWN
    local: dict[str, Any] = {}  # modules that the code itself imports
    for index, instruction in enumerate(instructions):
        if instruction.opname in GLOBALS:
            value = space.get(instruction.argval, UNKNOWN)
        elif instruction.opname == "IMPORT_NAME":
            value = sys.modules.get(instruction.argval, UNKNOWN)
        elif instruction.opname.startswith(LOCALS):
            value = local.get(instruction.argval, UNKNOWN)
        elif instruction.opname.startswith(STORES):
            local[instruction.argval] = value
        elif instruction.opname == "IMPORT_FROM":
            value = getattr(value, instruction.argval, UNKNOWN)
            yield from _function(value)
            value = UNKNOWN
            continue
        elif instruction.opname in ATTRIBUTES:
            receiver, name = value, instruction.argval
            value = getattr(receiver, name, UNKNOWN) if _is_looked_into(receiver) else UNKNOWN
            if _is_path(receiver) or (receiver is UNKNOWN and name in OF_PATHS):
                is_method = name in OF_PATHS or name in AMBIGUOUS
                yield from [f"Path.{name}"] if is_method else []
            elif receiver is UNKNOWN and name in AMBIGUOUS and near_paths:
                yield from [f"Path.{name}"] if _fits(instructions[index:], name) else []
        else:
            value = UNKNOWN
        yield from _function(value)


FUNCTIONS = frozenset(
    (FunctionType, BuiltinFunctionType)
)  # of Python's own modules; of others nothing is asked


def _function(value: Any) -> Iterator[str]:
    name = _known().get(value) if type(value) in FUNCTIONS else None
    if name:
        yield name


@cache
def _known() -> dict[Any, str]:
    of_os = [*OF_OS, *OPENING, *CLOSING, *READING]
    names = {getattr(os, name, None): f"os.{name}" for name in of_os}
    names |= {getattr(shutil, name, None): f"shutil.{name}" for name in OF_SHUTIL}
    names |= {_in_module(module, name): f"{module}.{name}" for module, name in LASTING}
    return {function: name for function, name in names.items() if function is not None}


@cache
def _candidates() -> frozenset[str]:
    lasting = [name for _, name in LASTING]
    of_os = [*OF_OS, *OPENING, *CLOSING, *READING]
    return frozenset([*of_os, *OF_SHUTIL, *lasting, *OF_PATHS, *AMBIGUOUS])


def _in_module(module: str, name: str) -> Any:
    """None where this system has no such, or an importer of the user's is in the way."""
    try:
        return getattr(owner_of(module), name, None)
    except Exception:
        return None


def lasting(names: Iterable[str], are_files: Callable[[], bool]) -> list[str]:
    """Those of the calls of all of a step's code that leave something behind.

    `are_files` says whether the descriptors that the code has by their numbers are those of files.
    """
    called = list(dict.fromkeys(names))
    opening, closing, reading = ({f"os.{n}" for n in part} for part in (OPENING, CLOSING, READING))
    harmless = opening if opening.isdisjoint(called) else opening | closing | reading
    if not reading.isdisjoint(called) and are_files():
        harmless = harmless | reading
    return [name for name in called if name not in harmless]


def _names_one(code: CodeType, space: Mapping[str, Any]) -> bool:
    return any(True for name in code.co_names for _ in _function(space.get(name)))


def _is_looked_into(value: Any) -> bool:
    return type(value) is ModuleType


def _is_path(value: Any) -> bool:
    cls = value if issubclass(type(value), type) else type(value)
    return issubclass(cls, PurePath)


def _is_near_paths(code: CodeType, space: Mapping[str, Any]) -> bool:
    """Whether it names a path, or what makes one."""
    values = (space.get(name) for name in code.co_names)
    return "pathlib" in code.co_names or any(map(_is_path, values))


def _fits(instructions: Sequence[dis.Instruction], name: str) -> bool:
    """As paths' methods are called: a string's `replace` takes two arguments, a frame's names
    them; `touch` takes any.
    """
    call, _, has_names = arguments(instructions)
    return name == "touch" or (call is not None and call.arg == 1 and not has_names)


def arguments(
    instructions: Sequence[dis.Instruction],
) -> tuple[dis.Instruction | None, list[dis.Instruction], bool]:
    """The call of a function whose loading comes first, what makes its arguments, and whether
    some have names; None where no call is found.
    """
    stack: list[dis.Instruction] = []
    effect, has_names = 0, False
    for instruction in instructions[1:]:
        effect += dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
        if instruction.opname in ("PRECALL", "PUSH_NULL", "KW_NAMES"):  # the call itself follows
            effect = 0 if instruction.opname == "PUSH_NULL" else effect
            has_names = has_names or instruction.opname == "KW_NAMES"
            continue
        if instruction.opname.startswith("CALL"):
            if len(stack) + effect <= 0:
                return instruction, stack, has_names or "KW" in instruction.opname
            has_names = False
        if effect > 0:
            stack += [instruction] * effect
        elif instruction.opname not in ("CACHE", "NOP", "RESUME"):
            del stack[len(stack) + effect :]
            stack[-1:] = [instruction]  # what it gives
        effect = 0
    return None, [], False

"""Tab completion: subcommands, options, their words, models, optimizers and files."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from speedkit_jupyter.exceptions import SpeedKitError


def complete(shell: Any, event: Any) -> list[str]:
    """What may stand at the cursor of a `%speedkit` or `%%speedbench` line."""
    from speedkit_jupyter.magics import parsing

    before = event.line[: len(event.line) - len(event.symbol)] if event.symbol else event.line
    words = before.split()
    if words and words[0].lstrip("%") == "speedbench":
        return _of_benchmark(shell, words, event.symbol)
    if len(words) <= 1:
        return list(parsing.SUBCOMMANDS)
    if words[1] == "apply":
        return _of_apply(shell, words)
    if words[1] == "code":
        return _of_code(shell, words)
    if words[1] == "report":
        return [*_models(shell), "--json"]
    if words[1] == "history":
        return [*_saved(), "--forget"]
    if words[1] == "verify":
        return _of_verify(words)
    if words[1] == "tuned":
        return ["list", "forget"] if len(words) == 2 else _learned()
    if words[1] == "help":
        return [*parsing.PARSERS]
    if words[1] == "config":
        return ["show", "load", "save", "reset"] if len(words) == 2 else _files()
    return []


def _of_apply(shell: Any, words: list[str]) -> list[str]:
    from speedkit_jupyter.magics import parsing

    known = parsing.options(parsing.apply_parser())
    last = words[-1]
    if last == "--optimizer":
        return _optimizers(shell)
    if last == "--config":
        return _files()
    if known.get(last):
        return list(known[last])
    if last == "--ctx":
        return ["ctx"]
    return [*_models(shell), *(name for name in known if name not in words)]


def _of_verify(words: list[str]) -> list[str]:
    from speedkit_jupyter.magics import parsing
    from speedkit_jupyter.measure.variants import AUTO, CURRENT
    from speedkit_jupyter.measure.variants import words as plan_words

    if words[-1] == "--plan":
        return [CURRENT, AUTO, *plan_words(), *_saved()]
    return list(parsing.options(parsing.verify_parser()))


def _of_code(shell: Any, words: list[str]) -> list[str]:
    from speedkit_jupyter.magics import parsing

    known = parsing.options(parsing.code_parser())
    if words[-1] == "--optimizer":
        return _optimizers(shell)
    if words[-1] == "--save":
        return []
    return list(known.get(words[-1]) or [*_models(shell), *known])


def _of_benchmark(shell: Any, words: list[str], symbol: str) -> list[str]:
    from speedkit_jupyter.magics import parsing
    from speedkit_jupyter.measure.variants import AUTO, BASELINE, CURRENT
    from speedkit_jupyter.measure.variants import words as plan_words

    last = words[-1]
    if last == "--compare" or (words[-2:-1] == ["--compare"] and last.endswith((",", "+"))):
        return [BASELINE, CURRENT, AUTO, *plan_words(), *_saved()]
    if last == "--model":
        return _models(shell)
    if last == "--optimizer":
        return _optimizers(shell)
    return list(parsing.options(parsing.speedbench_parser()))


def _saved() -> list[str]:
    from speedkit_jupyter import store

    with suppress(SpeedKitError):  # a store that can't be used is told where it is asked for
        return sorted({one.name for one in store.saved()})
    return []


def _learned() -> list[str]:
    from speedkit_jupyter import store

    with suppress(SpeedKitError):
        return ["all", *(str(one.number) for one in store.learned())]
    return ["all"]


def _models(shell: Any) -> list[str]:
    from speedkit_jupyter.magics.namespace import inside_others, models

    if not _torch_is_loaded():
        return []
    return list(models(shell.user_ns)) or list(inside_others(shell.user_ns))


def _optimizers(shell: Any) -> list[str]:
    from speedkit_jupyter.magics.namespace import optimizers

    return list(optimizers(shell.user_ns)) if _torch_is_loaded() else []


def _torch_is_loaded() -> bool:
    """Without torch there is no model to name, and a key press must not wait for its import."""
    import sys

    return "torch" in sys.modules


def _files() -> list[str]:
    here = Path()
    return sorted(str(p) for pattern in ("*.y*ml", "*/*.y*ml") for p in here.glob(pattern))

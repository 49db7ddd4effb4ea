"""Generate parts of the reference as Markdown. Each marker in a page names a function here."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from pathlib import Path

import speedkit_jupyter
from speedkit_jupyter import machines as shipped
from speedkit_jupyter.catalog import CATALOG
from speedkit_jupyter.machines.hardware import Hardware
from speedkit_jupyter.notebook.commands import commands, help_page
from speedkit_jupyter.plans.config import AUTO, SpeedConfig
from speedkit_jupyter.support import database, messages
from speedkit_jupyter.support.units import size, word

ROOT = Path(__file__).parents[2]


def table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [titles, ["---"] * len(titles), *rows]
    cells = [[str(cell).replace("|", r"\|").replace("<", r"\<") for cell in row] for row in lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def magics() -> str:
    """Return the options of every subcommand of `%speedkit` and of `%%speedbench`."""
    parts = []
    for topic in [*commands(), "speedbench"]:
        page = help_page(topic)
        name, _, about = page.headline.partition(": ")
        parts.append(f"## `{name}`\n\n{about[:1].upper()}{about[1:]}.")
        for section in page.sections:
            if section.body != "It has no options.":
                rows = [(f"`{row.cells[0]}`", row.cells[1]) for row in section.body.rows]
                parts.append(table(("option", "purpose"), rows))
    return "\n\n".join(parts)


def python() -> str:
    """Return autodoc directives for the public names: functions, classes, then errors."""
    public = {name: getattr(speedkit_jupyter, name) for name in speedkit_jupyter.__all__}
    groups = {
        "Functions": ("autofunction", lambda one: not inspect.isclass(one)),
        "Classes": ("autoclass", lambda one: inspect.isclass(one) and not is_error(one)),
        "Errors and warnings": ("autoexception", lambda one: is_error(one)),
    }
    parts = []
    for title, (directive, belongs) in groups.items():
        parts.append(f"## {title}")
        for name, one in public.items():
            if belongs(one):
                more = "\n   :members:" if directive == "autoclass" else ""
                # Pydantic's signatures are long, and the page on configs already has the options.
                values = "(**values)" if hasattr(one, "model_fields") else ""
                lines = f".. {directive}:: speedkit_jupyter.{name}{values}{more}"
                parts.append(f"### `{name}`\n\n```{{eval-rst}}\n{lines}\n```")
    return "\n\n".join(parts)


def is_error(one: object) -> bool:
    return inspect.isclass(one) and issubclass(one, BaseException)


def options() -> str:
    """Return a table of all config options, with their defaults and allowed values."""
    rows = []
    for entry in CATALOG:
        for path, info in {
            f"{entry.name}.{name}": one for name, one in entry.fields.items()
        }.items():
            rows.append((f"`{path}`", f"`{word(info.default)}`", info.description))
        if not entry.fields:
            described = SpeedConfig.model_fields[entry.name].description
            rows.append((f"`{entry.name}`", f"`{word(entry.default)}`", described))
    return table(("option", "default", "values"), rows)


def configs() -> str:
    """Return the text of each config file in the repository."""
    parts = []
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        parts.append(f"### `{path.name}`\n\n```yaml\n{text.rstrip()}\n```")
    return "\n\n".join(parts)


def variables() -> str:
    """Return a table of the environment variables that SpeedKit reads."""
    rows = [
        (f"`{AUTO}`", "`1` switches `%speedkit auto` on with the extension"),
        (
            f"`{messages.VARIABLE}`",
            f"{', '.join(messages.LEVELS)}: `quiet` has warnings only and no progress",
        ),
        (
            f"`{shipped.VARIABLE}`",
            "the machine to plan for: one of [these](machines.md), or a JSON file",
        ),
        (f"`{database.FOLDER}`", "the folder for results, learned plans and compiled code"),
    ]
    rows += [
        (f"`{entry.variable}`", f"the option `{entry.name}`: {entry.summary}")
        for entry in CATALOG
        if entry.variable
    ]
    return table(("variable", "effect"), rows)


def catalog() -> str:
    """Return a section for each optimization in the catalog."""
    parts = []
    for entry in CATALOG:
        text = " ".join(inspect.cleandoc(entry.__doc__ or "").split())
        about = {
            "helps": entry.helps,
            "risk": entry.risk,
            "numbers": entry.effect.value,
            "by hand": f"`{entry.line}`" if entry.line else "",
            "more": f"[{entry.page.split('/')[2]}]({entry.page})",
        }
        rows = [(name, told) for name, told in about.items() if told]
        parts.append(f"## `{entry.name}`: {entry.summary}\n\n{text}\n\n{table(('', ''), rows)}")
    return "\n\n".join(parts)


def machines() -> str:
    """Return a table of the machines whose descriptions ship with the package."""
    rows = []
    for name in shipped.names():
        one = Hardware.from_json(name)
        gpus = ", ".join(
            f"{gpu.name}{f', {size(gpu.memory_bytes)}' if gpu.memory_bytes else ''}"
            for gpu in one.accelerators
        )
        rows.append(
            (f"`{name}`", one.system, f"{one.cpu.name}, {one.cpu.usable_cores} cores", gpus)
        )
    return table(("name", "system", "CPU", "accelerators"), rows)

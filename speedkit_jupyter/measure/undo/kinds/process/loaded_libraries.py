"""Settings of libraries, where the user has loaded them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from speedkit_jupyter.measure.undo.kinds.settings import Known, Setting, calls, is_same, owner_of


def settings() -> Iterator[Setting]:
    """What is not loaded can't be read, and is left alone."""
    yield Setting(
        "numpy's errors",
        lambda: owner_of("numpy").geterr(),
        lambda value: owner_of("numpy").seterr(**value),
    )
    yield calls("numpy.seterrcall", "numpy", "geterrcall", "seterrcall")
    yield calls("numpy.setbufsize", "numpy", "getbufsize", "setbufsize")
    yield Setting(
        "printing of arrays",
        lambda: owner_of("numpy").get_printoptions(),
        lambda value: owner_of("numpy").set_printoptions(**value),
    )
    yield Setting("matplotlib.rcParams", _parameters, _write_parameters, "rcParams rc style use")
    yield Setting("figures of matplotlib", _figures, _close_figures)
    yield Setting("options of pandas", _options, _write_options, "set_option options")
    yield Setting(
        "sklearn.set_config",
        lambda: owner_of("sklearn").get_config(),
        lambda value: owner_of("sklearn").set_config(**value),
    )


def _parameters() -> Known:
    """But for the backend, which is looked for when it is first needed."""
    parameters = dict.items(owner_of("matplotlib").rcParams)
    return Known((name, value) for name, value in parameters if not name.startswith("backend"))


def _write_parameters(value: dict[str, Any]) -> None:
    """As they were: checked values need not be checked again."""
    dict.update(owner_of("matplotlib").rcParams, value)


def _figures() -> list[int]:
    return list(owner_of("matplotlib._pylab_helpers").Gcf.figs)


def _close_figures(value: list[int]) -> None:
    """Those that the step made; what it has drawn on others stays."""
    for number in _figures():
        if number not in value:
            owner_of("matplotlib._pylab_helpers").Gcf.destroy(number)


def _options() -> Known:
    pandas = owner_of("pandas")
    keys = owner_of("pandas._config.config")._registered_options
    return Known((key, pandas.get_option(key)) for key in keys)


def _write_options(value: dict[str, Any]) -> None:
    now = _options()
    for key, option in value.items():
        if not is_same(now[key], option):
            owner_of("pandas").set_option(key, option)

"""How many examples a property is tried on: so many, and more under `--hypothesis-profile`."""

from hypothesis import HealthCheck, settings

# A loaded machine makes examples slow, never wrong; a fixture that lasts over all examples of a
# test is one that each of them leaves as it was. Only `thorough` draws other examples each time.
SURE = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}
FULL, QUICK, THOROUGH = 100, 25, 1500


def register() -> None:
    """`quick` is the default, `thorough` is part of `make thorough`."""
    settings.register_profile("quick", max_examples=QUICK, derandomize=True, **SURE)
    settings.register_profile("thorough", max_examples=THOROUGH, **SURE)
    settings.load_profile("quick")


def examples(number: int) -> settings:
    """So many where others have a hundred: a quarter of them in the quick profile."""
    return settings(max_examples=number * settings.default.max_examples // FULL)

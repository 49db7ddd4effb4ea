"""Set the number of Hypothesis examples: few by default, more with `--hypothesis-profile`."""

from hypothesis import HealthCheck, settings

# No deadline, because a loaded machine makes examples slow. Fixtures may be function-scoped,
# because no example changes them. Only `thorough` draws new examples in each run.
SURE = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}
FULL, QUICK, THOROUGH = 100, 25, 1500


def register() -> None:
    """Register `quick`, the default profile, and `thorough`, the profile of `make thorough`."""
    settings.register_profile("quick", max_examples=QUICK, derandomize=True, **SURE)
    settings.register_profile("thorough", max_examples=THOROUGH, **SURE)
    settings.load_profile("quick")


def examples(number: int) -> settings:
    """Return settings with `number` examples, times 1/4 in `quick` and times 15 in `thorough`."""
    return settings(max_examples=number * settings.default.max_examples // FULL)

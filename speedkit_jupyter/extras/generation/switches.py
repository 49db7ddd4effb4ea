"""The list of this extra's switches; `static_cache` has a file of its own."""

from speedkit_jupyter.extras.generation.static_cache import StaticDecoding

SWITCHES = [StaticDecoding()]

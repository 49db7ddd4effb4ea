"""The list of this extra's switches."""

from speedkit_jupyter.extras.generation.static_cache import StaticDecoding

SWITCHES = [StaticDecoding()]

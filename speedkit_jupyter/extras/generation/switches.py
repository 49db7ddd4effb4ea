"""The entry for text generation in the catalog."""

from speedkit_jupyter.extras.generation.static_cache import StaticDecoding

SWITCHES = [StaticDecoding()]

"""Features of their own, each in a folder that the core finds by name."""

# First: the catalog collects the entries of all extras while it is imported.
import speedkit_jupyter.catalog  # noqa: F401

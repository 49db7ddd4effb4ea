"""Separate features, each in a folder that `support.extras` lists."""

# First: the catalog collects the entries of all extras while it is imported.
import speedkit_jupyter.catalog  # noqa: F401

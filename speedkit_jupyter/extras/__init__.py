"""Separate features, each in a folder that `support.extras` lists."""

# Imported before any extra: the catalog's import collects the entries of all extras.
import speedkit_jupyter.catalog  # noqa: F401

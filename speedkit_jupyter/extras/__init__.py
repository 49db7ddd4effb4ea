"""Separate features, each in a folder that `support.extras` lists."""

# Import the catalog before any extra, because it collects the entries of all extras.
import speedkit_jupyter.catalog  # noqa: F401

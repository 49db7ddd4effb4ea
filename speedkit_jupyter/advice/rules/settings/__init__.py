"""Switches, and what the catalog would change."""

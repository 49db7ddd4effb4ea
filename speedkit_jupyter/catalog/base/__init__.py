"""Base classes and records of the switches."""

"""The size of a batch: split where it does not fit, and measured."""

"""Measuring: interleaved variants of one step, in isolation, with honest statistics."""

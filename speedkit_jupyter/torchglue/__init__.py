"""Wrap torch's private names; add patches and hooks; control signals, glibc's heap, profiling."""

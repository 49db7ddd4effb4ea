"""Use torch's private names, patch torch, and control signals, glibc's heap and profiling."""

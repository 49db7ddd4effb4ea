"""Use torch's private names, patch and hook torch, control signals, glibc's heap and profiling."""

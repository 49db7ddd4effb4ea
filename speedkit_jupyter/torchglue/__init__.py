"""All private names of torch, patches, hooks, interrupts, the heap and torch's profiler."""

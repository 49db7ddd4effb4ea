"""Apply an operator to its own result many times, in the fastest way that is accurate enough."""

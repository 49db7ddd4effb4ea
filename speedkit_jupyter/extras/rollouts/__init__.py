"""Apply an operator to its own result many times; on request, in the fastest accurate way."""

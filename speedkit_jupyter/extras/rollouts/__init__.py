"""Apply an operator to its own result many times: ways, their speed, and their drift."""

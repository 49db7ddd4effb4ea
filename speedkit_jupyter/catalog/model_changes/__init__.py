"""How switches change models: calls, compiled code, tensors, attributes; undone in any order."""

"""The user's step, the objects that it reaches, and the plans under which it is measured."""

"""The user's step, the objects that it reaches, and the plans that it is tried under."""

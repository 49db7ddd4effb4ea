"""How far a step is off another one, and what of that rounding explains."""

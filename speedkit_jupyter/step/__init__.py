"""What is measured: a step, what it reaches, and the plans that it is tried under."""

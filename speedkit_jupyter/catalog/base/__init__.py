"""What every optimization is made of."""

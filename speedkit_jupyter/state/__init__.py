"""What a step may change, and how all of it is put back."""

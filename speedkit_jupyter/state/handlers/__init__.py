"""One handler for each kind of state: how it is found, copied, compared and put back."""

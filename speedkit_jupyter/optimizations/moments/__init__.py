"""Parts of `low_bit_optimizer`: moments that lie in few bits between the steps."""

"""Run cells on several processes: ipyparallel starts them, torch.distributed connects them."""

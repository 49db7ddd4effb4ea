"""More than one process: ipyparallel starts them and talks to them, torch.distributed computes."""

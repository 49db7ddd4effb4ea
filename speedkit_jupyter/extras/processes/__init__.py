"""Several processes: ipyparallel starts them and sends cells, torch.distributed connects ranks."""

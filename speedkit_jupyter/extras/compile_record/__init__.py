"""A record of the work of torch.compile in this session: seconds, graph breaks, recompiles."""

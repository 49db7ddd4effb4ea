"""The optimizations that this extra adds to the catalog."""

from speedkit_jupyter.extras.processes.distributed import Distributed

SWITCHES = [Distributed()]

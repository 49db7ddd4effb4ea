"""The entry for several processes in the catalog."""

from speedkit_jupyter.extras.processes.distributed import Distributed

SWITCHES = [Distributed()]

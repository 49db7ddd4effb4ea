"""The list of this extra's switches; `distributed` has a file of its own."""

from speedkit_jupyter.extras.processes.distributed import Distributed

SWITCHES = [Distributed()]

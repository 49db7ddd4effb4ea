"""The list of this extra's switches; `distributed` has its own file."""

from speedkit_jupyter.extras.processes.distributed import Distributed

SWITCHES = [Distributed()]

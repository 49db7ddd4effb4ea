"""The list of this extra's switches, in the order in which they are applied."""

from speedkit_jupyter.extras.by_request.activation_checkpointing import ActivationCheckpointing
from speedkit_jupyter.extras.by_request.quantization import Float8, Int4, Int8

SWITCHES = [ActivationCheckpointing(), Int8(), Int4(), Float8()]

"""Entries for the catalog, in the order of applying them."""

from speedkit_jupyter.extras.by_request.activation_checkpointing import ActivationCheckpointing
from speedkit_jupyter.extras.by_request.float8 import Float8
from speedkit_jupyter.extras.by_request.int4 import Int4
from speedkit_jupyter.extras.by_request.int8 import Int8

SWITCHES = [ActivationCheckpointing(), Int8(), Int4(), Float8()]

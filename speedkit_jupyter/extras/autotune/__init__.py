"""Kernel choices of Inductor's max-autotune for matrix products: recorded, replayed, predicted."""

from speedkit_jupyter.extras.autotune.api import detected as detected
from speedkit_jupyter.extras.autotune.api import models as models
from speedkit_jupyter.extras.autotune.api import off as off
from speedkit_jupyter.extras.autotune.api import predictions as predictions
from speedkit_jupyter.extras.autotune.api import record as record
from speedkit_jupyter.extras.autotune.api import train as train
from speedkit_jupyter.extras.autotune.api import use as use

"""Record, replay and predict the kernel choices of max-autotune for matrix products."""

from speedkit_jupyter.extras.autotune.tuner import detected as detected
from speedkit_jupyter.extras.autotune.tuner import models as models
from speedkit_jupyter.extras.autotune.tuner import off as off
from speedkit_jupyter.extras.autotune.tuner import predictions as predictions
from speedkit_jupyter.extras.autotune.tuner import record as record

"""What else is measured of a step, where the machine counts it: an entry each.

A field of records and files, and a column of the table, follow from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from speedkit_jupyter.machines import devices
from speedkit_jupyter.machines.devices import Read, synchronize
from speedkit_jupyter.measure.rounds import clock

if TYPE_CHECKING:
    import torch

# Counters move once in a millisecond or rarer (NVML in 20 to 100): steps are repeated so long.
LEAST_S = 0.3


@dataclass(frozen=True)
class Quantity:
    """`name` holds the unit, as in `energy_j`; `title` and `unit` are the table's words, `about` a
    line below it. `meter` returns for a device what reads the sum so far, None where none does.
    """

    name: str
    title: str
    unit: str
    about: str
    meter: Callable[[torch.device], Read | None]

    @property
    def of_a_sample(self) -> Quantity:
        """The same for one sample of the step's batch, as in `energy_per_sample_j`."""
        what, _, unit = self.name.rpartition("_")
        about = f"{self.title.capitalize()} a sample: over the rows that the model is called with."
        name, title = f"{what}_per_sample_{unit}", f"{self.title} a sample"
        return replace(self, name=name, title=title, about=about)

    def values(self, of_a_step: float, samples: float | None) -> dict[str, float]:
        """By name: of a step, and of a sample where it has a known number of them."""
        found = {self.name: of_a_step}
        return found | {self.of_a_sample.name: of_a_step / samples} if samples else found


ENERGY = "Energy: of one step, by the device's own counter, which counts all that runs there."
QUANTITIES = (Quantity("energy_j", "energy", "J", ENERGY, devices.joules),)


def of_a_step(step: Callable[[], object], device: torch.device, read: Read) -> float:
    """The mean over as many untimed steps as the counter needs."""
    __tracebackhide__ = True
    synchronize(device)
    steps, begun_s, before = 0, clock.now(), read()
    while not steps or clock.now() - begun_s < LEAST_S:
        step()
        synchronize(device)
        steps += 1
    return (read() - before) / steps

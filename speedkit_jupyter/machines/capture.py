"""CUDA graphs: work of a GPU is recorded once, and then done again by one call.

The one place that asks `torch.cuda` for it; what to record, and when, stands in `optimizations/`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

Result = TypeVar("Result")


class Cuda:
    """One GPU of NVIDIA's or AMD's, and a stream of our own that all is recorded on.

    Not by `torch.cuda.make_graphed_callables`: while that records, CUDA calls of any other thread
    fail (`capture_error_mode` is not among its arguments); it warms up on another stream than it
    records on, which hipBLASLt does not bear (pytorch#179961); and gradients that it gives are its
    own memory, which the next backward pass writes over (pytorch#181723).

    `epoch` counts the recordings that failed: graphs of before draw from a generator that is none
    any more.
    """

    epoch = 0

    def __init__(self, device: torch.device) -> None:
        import torch

        self.device = device
        self._stream = torch.cuda.Stream(device)

    def stream(self) -> int:
        """That the caller's work goes to at present."""
        import torch

        return torch.cuda.current_stream(self.device).cuda_stream

    def is_recording(self) -> bool:
        """Whether somebody records what this thread does."""
        import torch

        return torch.cuda.is_current_stream_capturing()

    def random_state(self) -> torch.Tensor:
        """Of the GPU's own generator; asking waits for nothing."""
        import torch

        return torch.cuda.get_rng_state(self.device)

    def set_random_state(self, state: torch.Tensor) -> None:
        """One that `random_state` gave."""
        import torch

        torch.cuda.set_rng_state(state, self.device)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """The block's work on the stream of our own, after all that was asked for before it."""
        import torch

        around = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(around)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            around.wait_stream(self._stream)

    def memory(self) -> Any:
        """Memory of their own for graphs that belong together; free once they are gone."""
        import torch

        return torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], Result], memory: Any) -> tuple[Result, Callable[[], None]]:
        """What `work` returns, and what does its CUDA work again, in the same memory.

        Recording computes nothing: the result has no values until the first replay. It raises what
        `work` raises, and RuntimeError for what can't be recorded; the current stream and the
        random numbers are then what they were.
        """
        import torch

        graph = torch.cuda.CUDAGraph()
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        generator = torch.cuda.default_generators[index]
        before = generator.clone_state()
        recording = torch.cuda.graph(
            graph, pool=memory, stream=self._stream, capture_error_mode="thread_local"
        )
        _free_workspaces()
        try:
            # torch's own block leaves its stream the current one where it can't end.
            with torch.cuda.stream(self._stream), _without_collecting(), recording:
                result = work()
        except BaseException:
            # A generator whose recording failed refuses to draw: another state takes its place.
            generator.graphsafe_set_state(before)
            type(self).epoch += 1
            raise
        finally:
            _free_workspaces()
        return result, graph.replay


def _free_workspaces() -> None:
    """So that cuBLAS takes new ones from the memory of what is recorded, and gives them up after.

    torch keeps one for each stream, and others free it for all (Inductor, for its own graphs).
    """
    import torch

    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()


@contextmanager
def _without_collecting() -> Iterator[None]:
    """What the garbage collector frees may be of CUDA, and break what is being recorded."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


# Those that record, by torch's word for them.
KINDS: dict[str, type[Cuda]] = {"cuda": Cuda}

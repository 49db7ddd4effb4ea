"""launch() with one NCCL worker, from a process that has already used CUDA."""

import pytest
import torch
from torch import nn

from speedkit_jupyter import launch
from speedkit_jupyter.extras.processes import workers

pytest.importorskip("ipyparallel")
no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
pytestmark = [pytest.mark.gpu, no_gpu]


@pytest.fixture
def trained():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).cuda()
    yield model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    workers.stop()


def test_a_model_on_the_gpu_is_trained_in_a_worker_with_nccl_and_comes_back(trained):
    model, optimizer = trained
    before = model[0].weight.detach().clone()

    def fit():
        import torch.distributed as dist

        wrapped = nn.parallel.DistributedDataParallel(model)
        wrapped(torch.ones(3, 4, device="cuda")).square().mean().backward()
        optimizer.step()
        return dist.get_backend(), str(next(wrapped.parameters()).device)

    assert launch(fit, n=1) == ("nccl", "cuda:0")
    assert model[0].weight.is_cuda
    assert not torch.equal(model[0].weight, before)


def test_a_model_in_parts_on_the_gpu_is_full_again_in_the_same_objects(trained):
    model, optimizer = trained

    def fit():
        from torch.distributed.device_mesh import init_device_mesh

        from speedkit_jupyter.extras.processes.sharding import Sharded, is_sharded

        own, data = list(map(id, model.parameters())), torch.ones(3, 4, device="cuda")
        with Sharded([*model, model], lambda: [optimizer], mesh=init_device_mesh("cuda", (1,))):
            was = is_sharded(model)
            for _ in range(2):
                optimizer.zero_grad()
                model(data).square().mean().backward()
                optimizer.step()
        model(data).sum().backward()
        optimizer.step()
        return was, is_sharded(model), own == list(map(id, model.parameters()))

    assert launch(fit, n=1) == (True, False, True)
    assert optimizer.state[model[0].weight]["step"] == 3

import os
import sys
from pathlib import Path

import pytest
import torch

from speedkit_jupyter import ConfigError, Hardware, machines
from speedkit_jupyter.machines.hardware import Accelerator, Cpu

MACHINES = machines.names()


def test_detection_gives_plausible_values_here() -> None:
    here = Hardware.detect()
    assert here.torch == torch.__version__
    assert here.python == ".".join(map(str, sys.version_info[:3]))
    assert 1 <= here.cpu.usable_cores <= here.cpu.logical_cores == os.cpu_count()
    assert here.cpu.memory_bytes > 2**28
    assert here.cpu.name not in ("", "unknown")
    assert here.cxx is None or Path(here.cxx).exists()
    cuda = [one for one in here.accelerators if one.kind == "cuda"]
    assert len(cuda) == torch.cuda.device_count()


def test_the_compiler_is_the_one_that_inductor_would_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", sys.executable)
    assert Hardware.detect().cxx == sys.executable
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert Hardware.detect().cxx is None


@pytest.mark.parametrize("name", MACHINES)
def test_a_stored_machine_survives_json(hardware, tmp_path: Path, name: str) -> None:
    machine = hardware(name)
    again = tmp_path / "machine.json"
    again.write_text(machine.to_json(), encoding="utf-8")
    assert Hardware.from_json(again) == Hardware.from_json(str(again)) == machine


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"sytem": "Linux"}', "sytem: Extra inputs are not permitted"),
        ('{"accelerators": [{"kind": "cuda", "nam": "x"}]}', "accelerators.0.nam: Extra inputs"),
        ('{"accelerators": [{"kind": "cudda"}]}', "accelerators.0.kind: Input should be 'cuda'"),
        ('{"cpu": {"usable_cores": 0}}', "cpu.usable_cores: Input should be greater than 0"),
        ("[1]", "Input should be"),
        ('{\n"cpu": {},\n}', "line 3"),
        ("", "Invalid JSON"),
    ],
)
def test_a_wrong_file_names_itself_and_the_mistake(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "machine.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        Hardware.from_json(path)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)


# Whether a GPU has Tensor Cores, bf16 and TF32.
UNITS = {
    "p100": (False, False, False), "v100": (True, False, False), "t4": (True, False, False),
    "gtx1660": (False, False, False), "a100": (True, True, True), "mi300x": (False, True, False),
}  # fmt: skip


@pytest.mark.parametrize("machine", UNITS)
def test_what_a_gpu_can(hardware, machine: str) -> None:
    gpu = hardware(machine).accelerator("cuda")
    assert gpu is not None
    assert (gpu.tensor_cores, gpu.bf16, gpu.tf32) == UNITS[machine]


@pytest.mark.parametrize(
    ("features", "bf16"),
    [((), False), (("avx2", "avx512_f"), False), (("avx512_bf16",), True), (("amx_bf16",), True)],
)
def test_a_cpu_multiplies_bf16_by_its_features(features: tuple[str, ...], bf16: bool) -> None:
    assert Cpu(features=features).bf16 == bf16


def test_a_device_string_names_an_accelerator_that_is_there() -> None:
    two = Hardware(accelerators=tuple(Accelerator(kind="cuda", name=name) for name in "ab"))
    names = [one and one.name for one in map(two.accelerator, ("cuda", "cuda:1", "cuda:2", "mps"))]
    assert names == ["a", "b", None, None]
    assert two.accelerator("cpu") is None

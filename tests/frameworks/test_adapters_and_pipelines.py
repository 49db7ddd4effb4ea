"""Check that plans keep the files, hooks and adapters of transformers, peft and diffusers."""

import hashlib
from pathlib import Path

import pytest
import torch
from IPython.core.error import UsageError
from training import llama

from speedkit_jupyter import Facts, SpeedConfig, advise, apply_speedups, benchmark, code, plan
from speedkit_jupyter.catalog.model_changes import autocast
from speedkit_jupyter.notebook.namespace import find_models
from speedkit_jupyter.rounds.budget import graphs
from speedkit_jupyter.support.wrappers import models_in

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]

PLANS = {
    "bf16": SpeedConfig(precision="bf16").alone(),
    "channels_last": SpeedConfig(channels_last=True).alone(),
    "inference": SpeedConfig(inference=True).alone(),
    "checkpointing": SpeedConfig(activation_checkpointing=True).alone(),
    "int8": SpeedConfig(int8="weights").alone(),  # merged layers run with their own weights
}
planned = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
IDS = torch.arange(24).reshape(2, 12)


def with_adapters():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model.add_adapter("other", peft.LoraConfig(r=3, target_modules=["q_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    return model


def unet():
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    sizes = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}
    return diffusers.UNet2DModel(sample_size=8, **blocks, **sizes).eval()


def look(model):
    """Return the attributes, hooks, modes and values of a model's modules, for a comparison."""
    found = {}
    for name, module in model.named_modules():
        hooks = {key: len(held) for key, held in vars(module).items() if "_hooks" in key}
        found[name] = type(module), sorted(vars(module)), hooks, module.training
    return found | {n: (t.dtype, t.stride(), digest(t)) for n, t in model.state_dict().items()}


def digest(tensor):
    return hashlib.md5(bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())).hexdigest()


def files(model, folder):
    model.save_pretrained(folder)
    found = (path for path in Path(folder).rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def call(model):
    with torch.no_grad():
        return model(IDS).logits


@planned
@pytest.mark.parametrize("make", [llama, with_adapters, unet])
def test_saved_files_are_the_same_as_without_a_plan(make, plan, tmp_path):
    wanted = files(make(), tmp_path / "plain")
    model = make()
    _, context = apply_speedups(model, plan)
    assert files(model, tmp_path / "planned") == wanted
    context.restore()
    assert look(model) == look(make())


CHANGES = {
    "swapped": lambda m, saved: (m.set_adapter("other"), call(m), m.set_adapter("default")),
    "loaded": lambda m, saved: (m.load_adapter(saved, "third"), m.set_adapter("third"), call(m)),
    "merged": lambda m, saved: (call(m), m.merge_adapter(), call(m)),
    "unloaded": lambda m, saved: (call(m), m.merge_and_unload()),
}


@planned
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_adapters_change_under_a_plan_as_without_one(change, plan, tmp_path):
    with_adapters().save_pretrained(tmp_path)
    plain, model = with_adapters(), with_adapters()
    change(plain, tmp_path)
    _, context = apply_speedups(model, plan)
    change(model, tmp_path)
    context.restore()
    assert look(model) == look(plain)


@pytest.mark.parametrize("change", [*CHANGES.values()][:3], ids=[*CHANGES][:3])
def test_adapters_on_weights_cast_once_compute_the_bits_of_autocast(change, tmp_path, monkeypatch):
    monkeypatch.setattr(autocast, "CAST_ONCE", 0)
    with_adapters().save_pretrained(tmp_path)
    plain, model = with_adapters(), with_adapters()
    _, context = apply_speedups(model, PLANS["bf16"])
    assert "cast once" in context.notes["precision"]
    call(model)
    for one in (plain, model):
        change(one, tmp_path)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = call(plain).float()
    assert torch.equal(call(model), wanted)


@pytest.mark.compile
def test_a_compiled_model_compiles_once_per_adapter_and_not_when_it_comes_back():
    plain, model, plan = with_adapters(), with_adapters(), {"enabled": True, "backend": "eager"}
    _, context = apply_speedups(model, SpeedConfig(compile=plan).alone())
    compiled = {"default": 0, "other": 0}
    for adapter in [*compiled] * 3:
        plain.set_adapter(adapter)
        model.set_adapter(adapter)
        before = graphs()
        assert torch.equal(call(model), call(plain))
        compiled[adapter] += graphs() - before
    context.restore()
    assert compiled == {"default": 1, "other": 1}


def test_code_with_int8_leaves_adapters(hardware):
    pytest.importorskip("torchao")
    machine = hardware("cpu").model_copy(update={"libraries": {"torchao": "0.18.0"}})
    model = with_adapters()
    exec(code(plan(SpeedConfig(int8=True).alone(), machine, Facts.read(model))), {"model": model})
    for name, module in model.named_modules():
        if type(module) is torch.nn.Linear:
            assert (type(module.weight) is torch.nn.Parameter) == ("lora_" in name), name


def test_advice_names_a_needless_cast_to_float32():
    peft = pytest.importorskip("peft")
    base = llama().bfloat16()
    base.config.dtype = torch.bfloat16  # as from_pretrained(dtype=…) sets it
    base = peft.prepare_model_for_kbit_training(base)
    model = peft.get_peft_model(base, peft.LoraConfig(r=2))
    step = lambda: model(IDS, labels=IDS).loss.backward()  # noqa: E731
    found = advise(step, model=model, budget_s=1.0)
    assert "needless_float32" in [one.rule for one in found.opportunities]


def offloaded(model):
    pytest.importorskip("accelerate").cpu_offload(model, execution_device="cpu")


def not_offloaded(model):
    pytest.importorskip("accelerate").hooks.remove_hook_from_module(model, recurse=True)


CHECKPOINTING = (lambda model: model.gradient_checkpointing_enable(),
                 lambda model: model.gradient_checkpointing_disable())  # fmt: skip


@pytest.mark.parametrize("plan", [*PLANS.values()][:4], ids=[*PLANS][:4])
@pytest.mark.parametrize("is_before", [True, False], ids=["before", "under"])
@pytest.mark.parametrize(("begin", "end"), [(offloaded, not_offloaded), CHECKPOINTING])
def test_hooks_of_libraries_survive_a_plan_and_its_restore(begin, end, is_before, plan):
    plain, model = llama(), llama()
    begin(plain)
    if is_before:
        begin(model)
    _, context = apply_speedups(model, plan)
    if not is_before:
        begin(model)
    call(model)
    context.restore()
    assert torch.equal(call(model), call(plain))
    end(model)
    end(plain)
    assert look(model) == look(plain)


def test_a_model_whose_weights_are_offloaded_is_measured():
    model = llama()
    offloaded(model)
    found = benchmark(lambda: call(model), ["baseline", "inference"], model=model, budget_s=1.0)
    assert [one.failure for one in found.records] == [None, None]
    assert next(model.parameters()).is_meta


def test_strides_are_restored_while_the_weights_are_offloaded(net):
    before = [one.stride() for one in net.parameters()]
    _, context = apply_speedups(net, PLANS["channels_last"])
    offloaded(net)
    context.restore()
    not_offloaded(net)
    assert [one.stride() for one in net.parameters()] == before


def test_a_pipeline_a_trainer_and_an_accelerator_hold_their_models(net, tmp_path):
    libraries = ("diffusers", "transformers", "accelerate")
    diffusers, transformers, accelerate = map(pytest.importorskip, libraries)
    pipe = diffusers.DDPMPipeline(unet=unet(), scheduler=diffusers.DDPMScheduler())
    arguments = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    trainer = transformers.Trainer(llama(), arguments)
    assert models_in(pipe) | models_in(trainer) == {".unet": pipe.unet, ".model": trainer.model}
    accelerator = accelerate.Accelerator(cpu=True)
    assert models_in(accelerator) == {}
    assert {"._models[0]": accelerator.prepare(net)} == models_in(accelerator)


def test_lightnings_trainer_holds_its_module_once_it_has_one(net):
    lightning = pytest.importorskip("lightning")
    trainer = lightning.Trainer(logger=False, accelerator="cpu", enable_checkpointing=False)
    assert models_in(trainer) == {}
    with pytest.raises(UsageError, match="before its first run, name the model itself"):
        find_models({"trainer": trainer}, "trainer")
    trainer.strategy.connect(module := lightning.LightningModule())
    module.net = net
    assert models_in(trainer) == {".model": module}

"""Typical notebooks with other libraries. Each function returns the step of one notebook.

With `guided`, the step follows the performance advice of the library's own guide.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import transformers
from _nets import Recurrent, images, pooled, untrained
from _workloads import Transformer
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

Step = Callable[[], object]
WORDS = 500
SMALL = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
ENDS = {
    "vocab_size": WORDS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
bf16 = partial(torch.autocast, "cpu", torch.bfloat16)


def words(*size: int) -> torch.Tensor:
    return torch.randint(3, WORDS, size)


def classes(count: int) -> torch.Tensor:
    return torch.randint(2, (count,))


def adamw(model: nn.Module, guided: bool) -> torch.optim.AdamW:
    trained = [one for one in model.parameters() if one.requires_grad]
    return torch.optim.AdamW(trained, 1e-4, fused=guided or None)


def training(
    guided: bool,
    model: nn.Module,
    loss_of: Callable[[Any], torch.Tensor],
    batches: Iterable[Any] = (None,),
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
    optimizer: Any = None,
) -> Step:
    """Return an epoch over batches; `guided` adds autocast and a fused optimizer."""
    optimizer = optimizer or adamw(model.train(), guided)

    def epoch() -> torch.Tensor:
        for batch in batches:
            with bf16(enabled=guided):
                loss = loss_of(batch)
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return epoch


def bert_by_trainer(guided: bool) -> Step:
    lengths = torch.randint(12, 64, (16,)).tolist()
    rows = [{"input_ids": words(length), "labels": length % 2} for length in lengths]
    advice = {"bf16": True, "optim": "adamw_torch_fused"} if guided else {"optim": "adamw_torch"}
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": True}
    arguments = transformers.TrainingArguments(tempfile.mkdtemp(), max_steps=2, **quiet, **advice)

    def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        ids = nn.utils.rnn.pad_sequence([one["input_ids"] for one in rows], True)
        labels = torch.tensor([one["labels"] for one in rows])
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}

    sizes = {"vocab_size": WORDS, "intermediate_size": 512, **SMALL}
    model = untrained("Bert", "BertForSequenceClassification", sizes)
    trainer = transformers.Trainer(model, arguments, padded, train_dataset=rows)
    trainer.remove_callback(transformers.PrinterCallback)
    return lambda: trainer.train().training_loss


def vit(guided: bool) -> Step:
    sizes = {"intermediate_size": 512, "image_size": 64, "patch_size": 8, **SMALL}
    model = untrained("ViT", "ViTForImageClassification", sizes)
    given = {"pixel_values": images(8, 3, 64), "labels": classes(8)}
    return training(guided, model, lambda _: model(**given).loss)


def gpt2() -> Any:
    sizes = {"n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": 256, **ENDS}
    return untrained("GPT2", "GPT2LMHeadModel", sizes).eval()


def lora_config() -> Any:
    import peft

    return peft.LoraConfig(
        target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False, lora_dropout=0.0
    )


def gpt2_with_lora(guided: bool) -> Step:
    import peft

    base, ids = gpt2(), words(4, 64)
    model = peft.get_peft_model(base.bfloat16() if guided else base, lora_config())
    return training(guided, model, lambda _: model(input_ids=ids, labels=ids).loss)


def swapped_adapters(guided: bool) -> Step:
    import peft

    model, ids = peft.get_peft_model(gpt2(), lora_config()), words(4, 64)
    model.add_adapter("other", lora_config())

    @torch.no_grad()
    def logits(name: str) -> torch.Tensor:
        model.set_adapter(name)
        with bf16(enabled=guided):
            return model(input_ids=ids).logits.float()

    return lambda: [*map(logits, ("default", "other"))]


UNET = {"sample_size": 16, "layers_per_block": 1, "norm_num_groups": 8, "attention_head_dim": 8,
        "block_out_channels": (32, 64)}  # fmt: skip


def diffusion_pipeline(guided: bool) -> Step:
    import diffusers

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    text = transformers.CLIPTextConfig(vocab_size=WORDS, num_attention_heads=4, **sizes)
    blocks = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D")}
    blocks |= {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}
    pipe = diffusers.StableDiffusionPipeline(
        diffusers.AutoencoderKL(block_out_channels=(32,), norm_num_groups=8, sample_size=16),
        transformers.CLIPTextModel(text).eval(),
        None,
        diffusers.UNet2DConditionModel(cross_attention_dim=32, **UNET, **blocks),
        diffusers.DDIMScheduler(),
        *(None, None),
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    prompt, asked = words(1, 77), {"num_inference_steps": 4, "guidance_scale": 1.0}
    if guided:
        pipe.unet.to(memory_format=torch.channels_last)
        pipe.unet.compile()

    @torch.no_grad()
    def step() -> Any:
        noise = torch.Generator().manual_seed(0)
        with bf16(enabled=guided):
            embeds = pipe.text_encoder(prompt)[0]
            return pipe(prompt_embeds=embeds, generator=noise, output_type="np", **asked).images

    return step


def unet_with_ema(guided: bool) -> Step:
    import diffusers
    from diffusers.training_utils import EMAModel

    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D")}
    blocks |= {"up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    model, scheduler = diffusers.UNet2DModel(**UNET, **blocks), diffusers.DDPMScheduler()
    average, x = EMAModel(model.parameters(), foreach=guided), images(4, 3, 16)

    def loss_of(_: None) -> torch.Tensor:
        average.step(model.parameters())
        noise, times = torch.randn_like(x), torch.randint(1000, (len(x),))
        return functional.mse_loss(model(scheduler.add_noise(x, noise, times), times).sample, noise)

    return training(guided, model, loss_of)


def generating(guided: bool, model: Any, **given: Any) -> Step:
    """Return a `generate` call; `guided` adds autocast, a static cache and a compiled forward."""
    if guided:
        model.generation_config.cache_implementation = "static"
        model.forward = torch.compile(model.forward)

    def step() -> torch.Tensor:
        with bf16(enabled=guided):
            return model.generate(**given, max_new_tokens=16, min_new_tokens=16)

    return step


def whisper(guided: bool) -> Step:
    parts, sizes = ("encoder", "decoder"), {"layers": 2, "attention_heads": 4, "ffn_dim": 256}
    both = {f"{part}_{name}": size for part in parts for name, size in sizes.items()}
    both |= {"d_model": 128, "max_source_positions": 100, "max_target_positions": 64, **ENDS}
    both |= {"suppress_tokens": [], "begin_suppress_tokens": []}
    model = untrained("Whisper", "WhisperForConditionalGeneration", both).eval()
    return generating(guided, model, input_features=torch.randn(2, 80, 200))


def gpt2_generate(guided: bool, **given: Any) -> Step:
    return generating(guided, gpt2(), input_ids=words(2, 32), **given)


def gpt2_padded(guided: bool) -> Step:
    mask = (torch.arange(32) >= torch.tensor([[0], [11]])).long()
    return gpt2_generate(guided, attention_mask=mask, do_sample=False)


def t5(guided: bool) -> Step:
    sizes = {"d_model": 128, "d_ff": 256, "d_kv": 32, "num_layers": 2, "num_heads": 4}
    model = untrained("T5", "T5ForConditionalGeneration", sizes | ENDS)
    x, y = words(4, 48), words(4, 24)
    return training(guided, model, lambda _: model(input_ids=x, labels=y).loss)


def lstm() -> nn.Module:
    return nn.Sequential(nn.Embedding(WORDS, 128), Recurrent(nn.LSTM, 128, 128, 2, 1))


def lengths_vary(guided: bool, model: nn.Module) -> Step:
    """Return an epoch over sentences of many lengths; `guided` compiles for dynamic lengths."""
    batches = [words(8, length) for length in torch.randint(8, 64, (4,)).tolist()]
    call = torch.compile(model, dynamic=True) if guided else model
    return training(guided, model, lambda x: call(x).square().mean(), batches)


def detection(guided: bool) -> Step:
    sizes = {"image_size": [64, 64], "patch_size": 8, "num_detection_tokens": 12, "num_labels": 3}
    sizes |= {"intermediate_size": 256, **SMALL}
    model, x = untrained("Yolos", "YolosForObjectDetection", sizes), images(4, 3, 64)
    found = [(classes(count), torch.rand(count, 4) / 4 + 0.3) for count in (1, 4, 2, 7)]
    boxes = [{"class_labels": kinds, "boxes": places} for kinds, places in found]
    return training(guided, model, lambda _: model(pixel_values=x, labels=boxes).loss)


class Graphs(nn.Module):
    """Graph network that adds each edge's message at its end node: maps (nodes, 32) to (32,)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            sent = layer(x)[edges[0]].to(x.dtype)
            x = torch.relu(x + torch.zeros_like(x).index_add(0, edges[1], sent))
        return x.mean(0)


def graphs(guided: bool) -> Step:
    sizes, model = torch.randint(20, 200, (6,)).tolist(), Graphs()
    call = torch.compile(model, dynamic=True) if guided else model
    batches = [(torch.randn(n, 32), torch.randint(n, (2, 4 * n))) for n in sizes]
    return training(guided, model, lambda one: call(*one).square().mean(), batches)


def pictures() -> DataLoader[Any]:
    return DataLoader(TensorDataset(images(32, 3, 32), classes(32)), batch_size=16)


def cnn() -> nn.Module:
    layers = (nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU())
    return pooled(*layers, width=64, classes=2)


def lightning_module(guided: bool) -> Step:
    import lightning

    class Classifier(lightning.LightningModule):
        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self.net, guided)

    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet, module, loader = dict.fromkeys(off, False), Classifier(), pictures()
    module.net = cnn()
    quiet |= {"accelerator": "cpu", "precision": "bf16-mixed" if guided else "32-true"}

    def fit() -> list[torch.Tensor]:
        lightning.Trainer(max_epochs=1, **quiet).fit(module, loader)
        return [one.detach().clone() for one in module.parameters()]

    return fit


def accelerate_loop(guided: bool) -> Step:
    import accelerate

    accelerator, net = accelerate.Accelerator(cpu=True), cnn()
    model, optimizer, loader = accelerator.prepare(net, adamw(net, guided), pictures())
    loss_of = lambda batch: functional.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    return training(guided, model, loss_of, loader, accelerator.backward, optimizer)


NOTEBOOKS: dict[str, Callable[[bool], Step]] = {
    "BERT by Trainer": bert_by_trainer,
    "ViT": vit,
    "GPT-2 with LoRA (peft)": gpt2_with_lora,
    "swapped adapters (peft)": swapped_adapters,
    "pipeline (diffusers)": diffusion_pipeline,
    "U-Net with EMA (diffusers)": unet_with_ema,
    "Whisper, generate": whisper,
    "GPT-2, greedy": partial(gpt2_generate, do_sample=False),
    "GPT-2, sampled": partial(gpt2_generate, do_sample=True),
    "GPT-2, padded": gpt2_padded,
    "T5": t5,
    "lengths, LSTM": lambda guided: lengths_vary(guided, lstm()),
    "lengths, transformer": lambda guided: lengths_vary(guided, Transformer()),
    "detection": detection,
    "graphs": graphs,
    "Lightning": lightning_module,
    "Accelerate": accelerate_loop,
}

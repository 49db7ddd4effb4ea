"""The Trainers of transformers and Lightning, which make optimizers in `train` and `fit`."""

import pytest
import torch
from torch import nn

from speedkit_jupyter import SpeedConfig, apply_speedups, benchmark
from speedkit_jupyter.extras.trainer_arguments import trainer as advising
from speedkit_jupyter.rounds.sampler import Policy
from speedkit_jupyter.step.variants import variant

pytestmark = pytest.mark.slow

FUSED = SpeedConfig(fused_optimizer=True).alone()


class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        words = torch.randint(3, 90, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": words.clone()}


@pytest.fixture
def trainer(tmp_path):
    return made(tmp_path)


def made(folder, **given):
    """Return a Trainer for a small Llama, with a callback that counts steps."""
    import transformers
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # it keeps the last precision

    class Counting(transformers.TrainerCallback):
        steps = 0

        def on_step_end(self, args, state, control, **more):
            self.steps += 1

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=37, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, max_steps=2, per_device_train_batch_size=4,
        report_to=[], disable_tqdm=True, save_strategy="no", logging_strategy="no",
        **{"optim": "adamw_torch", **given},
    )  # fmt: skip
    trainer = transformers.Trainer(
        transformers.LlamaForCausalLM(config), arguments, train_dataset=Sentences(),
        callbacks=[Counting()],
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("trained", "tried"), [(False, "baseline,bf16,fused_optimizer"), (True, "baseline,bf16")]
)
def test_training_with_transformers_is_measured_and_put_back(trainer, look, trained, tried):
    if trained:  # after this, its loader's state_dict() fails
        trainer.train()
    objects = trainer.model, *([trainer.optimizer, trainer.lr_scheduler] if trained else [])
    before = look(*objects)
    found = benchmark(trainer.train, tried, model=trainer.model, budget_s=0.1)
    assert before.changes(look(*objects)) == []
    assert found.records[0].failure is None
    assert found.records[1].failure is None
    assert [found.verdict(one) for one in found.records].count("wrong") == 0
    assert found.records[1].accuracy.verdict == "rounding", found.records[1].accuracy


@pytest.fixture(params=["automatic", "manual"])
def lightning(request, net, loader):
    """Return a module, and `fit()`, which trains it; a manual module has two optimizers."""
    import lightning

    class Average(lightning.Callback):
        def on_train_start(self, trainer, module):
            self.values = {name: one.clone() for name, one in module.state_dict().items()}

        def on_train_batch_end(self, trainer, module, *_):
            for name, one in module.state_dict().items():
                if one.is_floating_point():
                    self.values[name].lerp_(one, 0.1)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net
            self.automatic_optimization = request.param == "automatic"

        def training_step(self, batch, index):
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            if self.automatic_optimization:
                return loss
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
            for scheduler in self.lr_schedulers():
                scheduler.step()
            return None

        def configure_optimizers(self):
            if self.automatic_optimization:
                adam = torch.optim.Adam(self.parameters(), 1e-2)
                return [adam], [torch.optim.lr_scheduler.StepLR(adam, 1)]
            adam = torch.optim.Adam(self.net[0].parameters(), 1e-2)
            sgd = torch.optim.SGD(self.net[5].parameters(), 1e-2, momentum=0.9)
            decays = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.9)
            return [adam, sgd], [torch.optim.lr_scheduler.StepLR(adam, 1), decays]

    module = Module()

    silent = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )

    def fit():
        trainer = lightning.Trainer(
            max_steps=2 if module.automatic_optimization else 4,
            accelerator="cpu", devices=1, callbacks=[Average()], **silent,
        )  # fmt: skip
        trainer.fit(module, loader)
        return trainer

    return module, fit


@pytest.mark.sampled(2)
def test_training_with_lightning_is_measured_and_put_back(lightning, look, variants):
    module, fit = lightning
    before = look(module)

    def step():
        fit()

    found = benchmark(step, variants, budget_s=0.5)
    assert before.changes(look(module)) == []
    assert found.records[1].failure is None
    assert found.records[1].accuracy.verdict == "rounding", found.records[1].accuracy
    assert [found.verdict(one) for one in found.records].count("wrong") == 0


def test_lightnings_optimizers_are_switched_and_restored(lightning, look):
    module, fit = lightning
    trainer = fit()
    before = look(module, trainer.optimizers)
    _, context = apply_speedups(module, FUSED, optimizer=module.optimizers())
    groups = [group for one in trainer.optimizers for group in one.param_groups]
    assert all(group["fused"] is True for group in groups)
    context.restore()
    assert before.changes(look(module, trainer.optimizers)) == []


@pytest.mark.parametrize("word", ["bf16", "fused_optimizer"])
def test_a_plan_computes_the_bits_of_the_argument_that_it_stands_for(tmp_path, word):
    given = {"bf16": {"bf16": True}, "fused_optimizer": {"optim": "adamw_torch_fused"}}[word]
    by_argument = made(tmp_path, **given)
    advising.short_training(by_argument)()
    by_plan = made(tmp_path)
    with apply_speedups(by_plan.model, variant(word).config)[1]:
        advising.short_training(by_plan)()
    assert all(map(torch.equal, by_argument.model.parameters(), by_plan.model.parameters()))


@pytest.mark.parametrize("has_trained", [False, True])
def test_arguments_are_tried_on_a_trainer_and_left_alone(trainer, look, monkeypatch, has_trained):
    if has_trained:
        trainer.train()
    objects = trainer.model, *([trainer.optimizer, trainer.lr_scheduler] if has_trained else [])
    monkeypatch.setattr(Policy, "proves", True)
    monkeypatch.setattr(Policy, "to_check", lambda _, found: iter(found.records[-1:]))
    before, args = look(*objects), dict(vars(trainer.args))
    callbacks, own = [*trainer.callback_handler.callbacks], dict(vars(trainer))
    advisor = advising.TrainerAdvisor(trainer, 1.0, "%speedkit advise trainer")
    list(advisor.run())
    found = advisor.result()
    names = [one.name for one in found.records]
    names = [one for one in names if one != "fused_optimizer"]  # not tried if an optimizer exists
    assert names[:2] == ["baseline", "dataloader_num_workers=1"]
    assert names[2:] == ["per_device_train_batch_size=2,gradient_accumulation_steps=2"]
    assert found.records[-1].accuracy.gradient_error < 1e-9, found.records[-1]
    assert "wrong" not in [found.verdict(one) for one in found.records]
    assert before.changes(look(*objects)) == []
    assert (args, callbacks) == (vars(trainer.args), trainer.callback_handler.callbacks)
    assert vars(trainer).keys() == own.keys()  # no optimizer is left for the next training
    assert all(vars(trainer)[name] is one for name, one in own.items())


@pytest.mark.parametrize(("counts_tokens", "verdict"), [(True, "rounding"), (False, "wrong")])
def test_other_batch_sizes_are_right_where_an_update_has_the_same_gradients(
    tmp_path, counts_tokens, verdict
):
    trainer = made(tmp_path, gradient_accumulation_steps=2)
    trainer.model_accepts_loss_kwargs = counts_tokens  # else the loss is the mean of parts' means
    rows = [Sentences()[number] for number in range(16)]
    for number, row in enumerate(rows):
        row["labels"][: 1 + 5 * (number % 2)] = -100
    trainer.train_dataset = rows
    (larger,) = advising.other_parts(trainer.args)
    assert [*larger.values()] == [8, 1]
    torch.manual_seed(0)  # it decides the order of the samples
    accuracy = advising.same_update(trainer, larger, lambda: torch.manual_seed(0))
    assert accuracy.verdict == verdict, accuracy
    assert all(one.grad is None for one in trainer.model.parameters())
    assert (trainer.args.per_device_train_batch_size, trainer._train_batch_size) == (4, 4)


def test_the_line_has_the_arguments_that_are_proven_faster_and_counts_padding(trainer, tmp_path):
    trainer.train_dataset = [{"input_ids": [1] * length} for length in (2, 50) * 8]
    names = [one.name for one in advising.TrainerAdvisor(trainer, 40.0, "").result().records]
    assert ("compile" not in names, names[-1]) == (True, "fused_optimizer+compile")
    advisor = advising.TrainerAdvisor(trainer, 1.0, "")
    assert "Nothing was measured within the budget" in advisor.advice().to_text()
    for record in advisor.result().records:
        record.times_s = [1.0 if record.name.startswith(("fused", "per_device")) else 2.0] * 30
    told = advisor.advice().to_text()
    given = "per_device_train_batch_size=2, gradient_accumulation_steps=2"
    line = f'TrainingArguments(…, optim="adamw_torch_fused", {given})'
    assert line in told
    makes = {"TrainingArguments": type(trainer.args)}
    arguments = eval(line.replace("…", f"{str(tmp_path)!r}, use_cpu=True"), makes)
    assert (arguments.optim, arguments.train_batch_size) == ("adamw_torch_fused", 2)
    assert "48 % of the words in batches are padding, 0.0 %" in " ".join(told.split())

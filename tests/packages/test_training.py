"""Training loops of others: transformers' Trainer, accelerate, Lightning, peft; with accumulation, bfloat16 and checkpointing."""
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from uses import trained, use


def small_llama():
    from transformers import LlamaConfig, LlamaForCausalLM
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                                        num_key_value_heads=2, max_position_embeddings=64))


def small_bert():
    from transformers import BertConfig, BertForSequenceClassification
    return BertForSequenceClassification(BertConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                                                    hidden_dropout_prob=0, attention_probs_dropout_prob=0))


def examples(of_sequences):
    ids = torch.randint(0, 64, (32, 16))
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row[0] % 2 if of_sequences else row} for row in ids]


# what is asked of the Trainer -> (model, settings, how far values may differ: sums of bfloat16 are made in another order)
TRAINERS = {
    "plain": (small_llama, {}, 1e-3),
    "bf16": (small_llama, {"bf16": True}, 2e-2),
    "checkpointing": (small_llama, {"gradient_checkpointing": True}, 1e-3),
    "reentrant checkpointing": (small_llama, {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}, 1e-3),
    "all": (small_llama, {"bf16": True, "gradient_checkpointing": True, "label_smoothing_factor": 0.1}, 2e-2),
    "classification": (small_bert, {}, 1e-3)}


@pytest.mark.parametrize("name", TRAINERS)
def test_trainer(name, tmp_path):
    make, settings, rtol = TRAINERS[name]

    @use("transformers", "accelerate", graphs=2, rtol=rtol, atol=rtol)      # a graph for training, one for evaluation
    def trains(compile):
        from transformers import Trainer, TrainingArguments
        model = make()
        args = TrainingArguments(output_dir=str(tmp_path), per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=4, logging_steps=1, report_to=[],
                                 save_strategy="no", eval_strategy="steps", eval_steps=2, use_cpu=True, disable_tqdm=True, learning_rate=1e-3,
                                 torch_compile=compile is torch.compile, **settings)
        data = examples(make is small_bert)
        trainer = Trainer(model=model, args=args, train_dataset=data, eval_dataset=data[:8])
        trainer.train()
        logs = trainer.state.log_history
        return [row["loss"] for row in logs if "loss" in row], [row["eval_loss"] for row in logs if "eval_loss" in row], list(model.state_dict())
    trains()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x):
        return x + nn.functional.gelu(self.linear(self.norm(x)))


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(16, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def data_of(rows):
    return DataLoader(TensorDataset(torch.randn(rows, 16), torch.randint(0, 3, (rows,))), batch_size=6)


@pytest.mark.parametrize("regional", [False, True], ids=["whole", "regional"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(regional, precision):
    @use("accelerate", graphs=9, rtol=1e-3 if precision == "no" else 3e-2, atol=1e-3)
    def trains(compile):
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState
        from accelerate.utils import TorchDynamoPlugin
        AcceleratorState._reset_state(reset_partial_state=True)
        plugin = TorchDynamoPlugin(backend="inductor", use_regional_compilation=regional) if compile is torch.compile else None
        accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2, dynamo_plugin=plugin)
        model = Tower()
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, data_of(32))
        losses = []
        for _ in range(2):
            for x, y in loader:
                with accelerator.accumulate(model):
                    loss = nn.functional.cross_entropy(model(x), y)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(accelerator.gather(loss.detach()).mean().item())
        model.eval()
        with torch.no_grad():
            return losses, model(torch.ones(4, 16)).float(), sorted(accelerator.unwrap_model(model).state_dict())
    trains()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning(precision):
    @use("lightning", "torchmetrics", graphs=10, breaks=11, rtol=1e-3 if precision == "32-true" else 3e-2, atol=1e-3)
    def trains(compile):
        import lightning
        import torchmetrics

        class Lit(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.tower, self.error, self.losses = Tower(), torchmetrics.MeanSquaredError(), []

            def forward(self, x):
                return self.tower(x)

            def training_step(self, batch, index):
                loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
                self.log("loss", loss)
                self.losses.append(loss.item())
                return loss

            def validation_step(self, batch, index):
                found = self(batch[0])
                self.error(found.float().softmax(-1)[:, 0], (batch[1] == 0).float())
                self.log("error", self.error)
                self.log("validation", nn.functional.cross_entropy(found, batch[1]))

            def configure_optimizers(self):
                optimizer = torch.optim.SGD(self.parameters(), 1e-2)
                return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]
        module, loader = Lit(), data_of(30)
        trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", precision=precision, accumulate_grad_batches=2, gradient_clip_val=1.0, logger=False,
                                    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        trainer.fit(compile(module), loader, loader)
        return module.losses, {name: value.item() for name, value in trainer.callback_metrics.items()}
    trains()


@use("lightning", graphs=1, rtol=3e-2)
def test_fabric(compile):
    from lightning.fabric import Fabric
    fabric = Fabric(accelerator="cpu", precision="bf16-mixed", devices=1)
    fabric.launch()
    model = compile(Tower())
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    x, y, losses = torch.randn(8, 16), torch.randint(0, 3, (8,)), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


ADAPTERS = {
    "lora": ("LoraConfig", {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}),
    "lora of all": ("LoraConfig", {"r": 4, "target_modules": "all-linear", "use_rslora": True, "modules_to_save": ["lm_head"]}),
    "dora": ("LoraConfig", {"r": 4, "target_modules": ["q_proj", "v_proj"], "use_dora": True}),
    "ia3": ("IA3Config", {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "prompt": ("PromptTuningConfig", {"num_virtual_tokens": 4}),
    "prefix": ("PrefixTuningConfig", {"num_virtual_tokens": 4}),
    "adalora": ("AdaLoraConfig", {"init_r": 4, "target_r": 2, "total_step": 10, "target_modules": ["q_proj", "v_proj"]}),
    "loha": ("LoHaConfig", {"r": 4, "target_modules": ["q_proj", "v_proj"]}),
    "vera": ("VeraConfig", {"r": 4, "target_modules": ["q_proj"]}),
    "oft": ("OFTConfig", {"oft_block_size": 8, "target_modules": ["q_proj"]})}


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters(name):
    kind, settings = ADAPTERS[name]

    @use("peft", "transformers", graphs=3)      # training, evaluation, and with the adapter off
    def trains(compile):
        import peft
        tasks = {} if name in ("lora of all", "loha", "vera", "oft") else {"task_type": "CAUSAL_LM"}
        model = peft.get_peft_model(small_llama(), getattr(peft, kind)(**settings, **tasks)).train()
        compiled, losses = compile(model), []
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1e-2)
        for _ in range(3):
            ids = torch.randint(0, 64, (2, 12))
            loss = compiled(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            found = [compiled(input_ids=ids).logits]
            if name == "lora":
                with model.disable_adapter():
                    found.append(compiled(input_ids=ids).logits)
        return losses, found, [p.detach() for p in model.parameters() if p.requires_grad]
    trains()


@use("transformers", breaks=11, graphs=9)
def test_speech(compile):
    """Spans of time are masked by indices that NumPy draws, layers dropped by chance, labels of a loss selected by a mask."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC
    settings = Wav2Vec2Config(hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=48, conv_dim=(16, 16), conv_stride=(5, 2),
                              conv_kernel=(10, 3), num_feat_extract_layers=2, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, vocab_size=12,
                              mask_time_length=2, mask_time_prob=0.3, layerdrop=0.1)
    model = Wav2Vec2ForCTC(settings).train()
    step, sound, labels = compile(lambda x, labels: model(x, labels=labels).loss), torch.randn(2, 400), torch.randint(1, 12, (2, 5))
    return trained(model, lambda: step(sound, labels), count=2)

"""Training with DDP, FSDP2, tensor and loss parallelism, under the settings that programs give them."""
import torch
from programs_sharded import MESH, RANK, Block, trained
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import firesteel as fs

SQUARE = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "model"))


class Checkpointed(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Stack(nn.Module):
    """Computes before, between and after its sharded layers."""

    def __init__(self, block=Block):
        super().__init__()
        self.first, self.layers, self.last = nn.Linear(8, 8), nn.ModuleList([block(), block()]), nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x).relu()
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def sharded(block=Block, **settings):
    model = Stack(block)
    for layer in model.layers:
        fully_shard(layer, **settings)
    return fully_shard(model, **settings)


def program_fsdp2_in_bf16():
    return trained(lambda: sharded(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)), tolerance=0.02)


def program_fsdp2_keeps_parameters():
    return trained(lambda: sharded(reshard_after_forward=False))


def program_fsdp2_checkpointed():
    return trained(lambda: sharded(Checkpointed))


def program_fsdp2_on_two_dimensions():
    return trained(lambda: sharded(mesh=SQUARE))


def accumulated(call, model, x):
    for sync in (False, True):
        model.set_requires_gradient_sync(sync)
        call(x + sync).square().mean().backward()
    return [p.grad for p in model.parameters()]


def program_fsdp2_accumulates():
    return trained(sharded, step=accumulated)


def optimised(call, model, x):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = optimizer.step if call is model else fs.compile(optimizer.step)
    for _ in range(2):
        optimizer.zero_grad()
        call(x).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        step()
    return norm, list(model.parameters())


def program_fsdp2_clips_and_optimises():
    return trained(sharded, step=optimised)


def both_ways():
    """Tensor parallel in each layer, sharded over the other dimension."""
    model = Stack()
    for layer in model.layers:
        parallelize_module(layer, SQUARE["model"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(layer, mesh=SQUARE["data"])
    return fully_shard(model, mesh=SQUARE["data"])


def program_tensor_parallel_and_sharded():
    return trained(both_ways)


# -- tensor parallelism ---------------------------------------------------------------------------------------------------
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.norm, self.attention, self.block, self.head = nn.Embedding(16, 8), nn.LayerNorm(8), Attention(), Block(), nn.Linear(8, 16)

    def forward(self, words):
        x = self.words(words)
        return self.head(self.block(x + self.attention(self.norm(x))))


WORDS = torch.arange(12).reshape(2, 6) % 16
COLUMNS = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
SEQUENCES = {
    "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)), "norm": SequenceParallel(), **COLUMNS,
    "attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()), "attention.out": RowwiseParallel(output_layouts=Shard(1)),
    "block.up": ColwiseParallel(input_layouts=Shard(1)), "block.down": RowwiseParallel(output_layouts=Shard(1)),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())}


def on_words(call, model, x):
    out = call(WORDS)
    out.square().mean().backward()
    return out, [p.grad for p in model.parameters()]


def program_sequence_parallel():
    return trained(lambda: parallelize_module(Language(), MESH, SEQUENCES), step=on_words)


def sharded_loss(call, model, x):
    with loss_parallel():
        loss = cross_entropy(call(WORDS).flatten(0, 1), WORDS.flatten())
        loss.backward()
    return loss, [p.grad for p in model.parameters()]


def program_loss_parallel():
    plan = {**COLUMNS, "attention.out": RowwiseParallel(), "head": ColwiseParallel(use_local_output=False)}
    return trained(lambda: parallelize_module(Language(), MESH, plan), step=sharded_loss)


# -- DDP ------------------------------------------------------------------------------------------------------------------
def program_ddp_views_of_buckets():
    return trained(lambda: DistributedDataParallel(Stack(), gradient_as_bucket_view=True))


def hooked(hook, state=lambda: None):
    def make():
        model = DistributedDataParallel(Stack())
        model.register_comm_hook(state(), hook)
        return model
    return make


def program_ddp_sends_fp16():
    return trained(hooked(fp16_compress_hook), tolerance=0.01)


def program_ddp_sends_low_rank():
    return trained(hooked(powerSGD_hook, lambda: PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)), tolerance=1e-3)


def joined(call, model, x):
    with model.join():
        for _ in range(1 + RANK):
            call(x).square().mean().backward()
    return [p.grad for p in model.parameters()]


def program_ddp_joins():
    return trained(lambda: DistributedDataParallel(Stack()), step=joined)

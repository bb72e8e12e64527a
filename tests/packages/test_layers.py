"""Layers and losses: einops, x-transformers, vector-quantize-pytorch, entmax, e3nn, torch-geometric, kornia, monai, torchmetrics, pytorch-metric-learning."""
import torch
from torch import nn
from uses import gradients, trained, use


@use("einops", graphs=1)
def test_einops(compile):
    from einops import einsum, pack, rearrange, reduce, repeat, unpack
    from einops.layers.torch import Rearrange, Reduce
    patches = nn.Sequential(Rearrange("b c (h p) (w q) -> b (h w) (p q c)", p=2, q=2), nn.Linear(12, 6), Reduce("b n d -> b d", "mean"))

    def fn(x):
        a = rearrange(x, "b c h w -> b (h w) c")
        packed, shapes = pack([a, repeat(reduce(a, "b n c -> b c", "max"), "b c -> b k c", k=2)], "b * c")
        return einsum(packed, packed, "b i c, b j c -> b i j"), unpack(packed, shapes, "b * c"), patches(x)
    found = compile(fn)(torch.randn(2, 3, 4, 4))
    found[-1].sum().backward()
    return found, gradients(patches)


@use("x_transformers", graphs=1)
def test_x_transformers(compile):
    from x_transformers import Decoder, TransformerWrapper
    model = TransformerWrapper(num_tokens=32, max_seq_len=16, attn_layers=Decoder(dim=16, depth=2, heads=2, attn_dim_head=8, rotary_pos_emb=True, ff_glu=True, use_rmsnorm=True))
    compiled, ids = compile(model), torch.randint(0, 32, (2, 16))
    return trained(model, lambda: nn.functional.cross_entropy(compiled(ids).transpose(1, 2), ids))


@use("x_transformers", graphs=1)
def test_autoregressive_wrapper(compile):
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper
    model = AutoregressiveWrapper(TransformerWrapper(num_tokens=32, max_seq_len=16, attn_layers=Decoder(dim=16, depth=2, heads=2, attn_dim_head=8)))
    compiled, ids = compile(model), torch.randint(0, 32, (2, 16))
    return trained(model, lambda: compiled(ids))


@use("vector_quantize_pytorch", graphs=2)
def test_vector_quantizer(compile):
    from vector_quantize_pytorch import VectorQuantize
    model = VectorQuantize(dim=8, codebook_size=16, decay=0.8, commitment_weight=1.0)
    compiled, x = compile(model), torch.randn(2, 12, 8, requires_grad=True)
    for _ in range(3):
        quantized, indices, loss = compiled(x)
    (quantized.sum() + loss.sum()).backward()
    return quantized, indices, loss, x.grad, model.state_dict()


@use("vector_quantize_pytorch", graphs=1)
def test_finite_scalar_quantizer(compile):
    from vector_quantize_pytorch import FSQ
    model = FSQ([8, 5, 5])
    x = torch.randn(2, 12, 3, requires_grad=True)
    quantized, indices = compile(model)(x)
    quantized.sum().backward()
    return quantized, indices, x.grad


@use("entmax", graphs=1)
def test_entmax(compile):
    import entmax
    x = torch.randn(4, 9, requires_grad=True)
    found = compile(lambda x: (entmax.entmax15(x, dim=-1), entmax.sparsemax(x, dim=-1), entmax.entmax_bisect(x, alpha=1.3)))(x)
    sum((one * torch.arange(9)).sum() for one in found).backward()
    return found, x.grad


@use("e3nn", graphs=2)
def test_e3nn(compile):
    from e3nn import o3
    product = o3.FullyConnectedTensorProduct("2x0e + 1x1o", "1x0e + 1x1o", "2x0e + 1x1o")
    x, y = torch.randn(4, 5), torch.randn(4, 4)
    found = compile(product)(x, y)
    found.sum().backward()
    return found, compile(lambda v: o3.spherical_harmonics([0, 1, 2], v, True))(torch.randn(5, 3)), gradients(product)


@use("torch_geometric", breaks=2, graphs=3)
def test_graph_layers(compile):
    from torch_geometric.nn import GATConv, GCNConv, SAGEConv, global_mean_pool

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = GCNConv(6, 8), GATConv(8, 4, heads=2), SAGEConv(8, 3)

        def forward(self, x, edges, batch):
            return global_mean_pool(self.c(self.b(self.a(x, edges).relu(), edges).relu(), edges), batch, 2)
    model, x, edges = Net(), torch.randn(10, 6), torch.randint(0, 10, (2, 30))
    compiled, batch = compile(model), torch.arange(10) // 5
    return trained(model, lambda: compiled(x, edges, batch).square().mean())


@use("kornia", graphs=1)
def test_image_filters(compile):
    import kornia
    x = torch.rand(2, 3, 12, 12, requires_grad=True)
    found = compile(lambda x: (kornia.filters.gaussian_blur2d(x, (3, 3), (1.0, 1.0)), kornia.filters.sobel(x), kornia.color.rgb_to_hsv(x),
                               kornia.color.rgb_to_lab(x), kornia.losses.ssim_loss(x, x * 0.9, 5)))(x)
    found[0].sum().backward()
    return found, x.grad


@use("kornia", graphs=1)
def test_image_geometry(compile):
    import kornia
    x = torch.rand(2, 3, 12, 12)
    return compile(lambda x: (kornia.geometry.rotate(x, torch.tensor([30.0, 60.0])), kornia.geometry.hflip(x), kornia.enhance.adjust_gamma(x, 0.5)))(x)


@use("monai", breaks=1, graphs=3)
def test_segmentation(compile):
    from monai.losses import DiceCELoss
    from monai.networks.nets import UNet
    model = UNet(spatial_dims=2, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2), num_res_units=1)
    loss, compiled = DiceCELoss(to_onehot_y=True, softmax=True), compile(model)
    x, y = torch.randn(2, 1, 16, 16), torch.randint(0, 2, (2, 1, 16, 16))
    both = compile(lambda a, b: loss(a, b))
    return trained(model, lambda: both(compiled(x), y), lr=1e-3)


@use("monai", graphs=1)
def test_vision_transformer(compile):
    from monai.networks.nets import UNETR
    model = UNETR(in_channels=1, out_channels=2, img_size=16, feature_size=4, hidden_size=16, mlp_dim=32, num_heads=2, spatial_dims=2)
    compiled, x = compile(model), torch.randn(1, 1, 16, 16)
    return trained(model, lambda: compiled(x).square().mean(), count=1)


@use("torchmetrics", breaks=1, graphs=4)
def test_metrics(compile):
    from torchmetrics import MeanSquaredError, functional
    p, t = torch.randn(16, 4).softmax(-1), torch.randint(0, 4, (16,))
    ours = compile(lambda p, t: (functional.accuracy(p, t, task="multiclass", num_classes=4), functional.f1_score(p, t, task="multiclass", num_classes=4),
                                 functional.confusion_matrix(p, t, task="multiclass", num_classes=4), functional.cosine_similarity(p, p + 1)))(p, t)
    metric = MeanSquaredError()
    step = compile(lambda a, b: metric(a, b))
    return ours, step(p, p * 2), step(p, p * 3), metric.compute()


@use("pytorch_metric_learning", breaks=3, graphs=4)
def test_metric_losses(compile):
    from pytorch_metric_learning import losses
    x, labels = torch.randn(12, 6, requires_grad=True), torch.arange(12) % 3
    contrastive, arc = losses.NTXentLoss(), losses.ArcFaceLoss(3, 6)
    a, b = compile(lambda x: contrastive(x, labels))(x), compile(lambda x: arc(x, labels))(x)
    (a + b).backward()
    return a, b, x.grad


@use("sentence_transformers", graphs=1)
def test_sentence_losses(compile):
    from sentence_transformers import util
    a, b = torch.randn(4, 8), torch.randn(5, 8)
    return compile(lambda a, b: (util.cos_sim(a, b), util.dot_score(a, b), util.pairwise_cos_sim(a, b[:4])))(a, b)


def train(compile, model, optimizer, x):
    """Three compiled steps."""
    def step(x):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    compiled = compile(step)
    for _ in range(3):
        compiled(x)


@use("schedulefree", graphs=3)
def test_schedule_free_optimizer(compile):
    import schedulefree
    model, x = nn.Linear(4, 2), torch.randn(8, 4)
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.01, warmup_steps=2)
    optimizer.train()
    train(compile, model, optimizer, x)
    optimizer.eval()
    return list(model.parameters())


@use("lion_pytorch", graphs=2)
def test_lion(compile):
    from lion_pytorch import Lion
    model, x = nn.Linear(4, 2), torch.randn(8, 4)
    optimizer = Lion(model.parameters(), lr=0.01)
    train(compile, model, optimizer, x)
    return list(model.parameters())

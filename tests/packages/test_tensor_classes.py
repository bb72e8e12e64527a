"""Classes of tensors, and programs around them: torchao, pypose, torchcde, zuko, mambapy, pytorch_optimizer."""
import torch
from torch import nn
from uses import gradients, trained, use


@use("torchao", graphs=4)
def test_torchao_quantised(compile):
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_
    results = []
    for config in (Int8WeightOnlyConfig(), Int8DynamicActivationInt8WeightConfig()):
        model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)).eval()
        quantize_(model, config)
        compiled = compile(model)
        with torch.no_grad():
            results += [compiled(torch.randn(4, 32)), compiled(torch.randn(6, 32))]
    return results


@use("pypose", graphs=15, breaks=16)
def test_pypose(compile):
    import pypose

    def moved(x):
        pose = pypose.se3(x).Exp()
        return (pose * pose.Inv()).tensor().square().sum() + (pose * pose).Act(torch.ones(5, 3)).square().mean()
    x = torch.randn(5, 6, requires_grad=True)
    loss = compile(moved)(x)
    loss.backward()
    return loss.detach(), x.grad


class ControlledField(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 12)

    def forward(self, t, z):
        return self.linear(z).tanh().view(*z.shape[:-1], 4, 3)


@use("torchcde", graphs=3, breaks=2)
def test_torchcde(compile):
    import torchcde
    field = ControlledField()

    def step(coefficients):
        path = torchcde.CubicSpline(coefficients)
        start = path.evaluate(path.interval[0]) @ torch.ones(3, 4)
        return torchcde.cdeint(X=path, func=field, z0=start, t=path.interval, method="rk4", adjoint=False, options={"step_size": 1.0}).square().mean()
    coefficients = torchcde.hermite_cubic_coefficients_with_backward_differences(torch.randn(5, 10, 3))
    compiled = compile(step)
    return trained(field, lambda: compiled(coefficients))


@use("zuko", graphs=3)
def test_zuko(compile):
    import zuko
    flow = zuko.flows.NSF(3, 2, transforms=2, hidden_features=(16, 16))
    x, context = torch.randn(32, 3), torch.randn(32, 2)
    loss = compile(lambda x, context: -flow(context).log_prob(x).mean())
    return trained(flow, lambda: loss(x, context)), loss(x[:7], context[:7]).detach(), compile(lambda context: flow(context).sample((4,)))(context[:5]).detach()


@use("mambapy", graphs=2)
def test_mambapy(compile):
    from mambapy.mamba import Mamba, MambaConfig
    model, x = Mamba(MambaConfig(d_model=8, n_layers=2, d_state=4)), torch.randn(2, 12, 8)
    compiled = compile(model)
    return trained(model, lambda: compiled(x).square().mean()), compiled(x[:, :7]).detach()


@use("pytorch_optimizer", graphs=12)
def test_pytorch_optimizer(compile):
    import pytorch_optimizer
    results = []
    for name in ("Lion", "Adan", "CAME", "ScheduleFreeAdamW"):
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer, x = getattr(pytorch_optimizer, name)(net.parameters()), torch.randn(8, 4)

        @compile
        def step():
            net(x).square().mean().backward()      # noqa: B023
            optimizer.step()                       # noqa: B023
        for _ in range(3):
            step()
            optimizer.zero_grad()
        results.append(gradients(net) | {name: p.detach().clone() for name, p in net.named_parameters()})
    return results

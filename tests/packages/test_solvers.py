"""Differential equations and operators: torchdiffeq, torchsde, torchode, neuraloperator."""
import torch
from torch import nn
from uses import gradients, trained, use


class Field(nn.Module):
    noise_type, sde_type = "diagonal", "ito"

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, t, y):
        return self.net(y)

    def f(self, t, y):
        return self.net(y)

    def g(self, t, y):
        return 0.1 * y


def solved(field, y):
    """A solution, and the gradients of its squares."""
    y.square().sum().backward()
    return y, gradients(field)


@use("torchdiffeq", graphs=2)
def test_ode_field(compile):
    from torchdiffeq import odeint
    field = Field()
    y = odeint(compile(field), torch.ones(3, 2), torch.linspace(0, 1, 4), method="dopri5")
    return solved(field, y)


@use("torchdiffeq", graphs=2)
def test_ode_adjoint_field(compile):
    from torchdiffeq import odeint_adjoint
    field = Field()
    y = odeint_adjoint(compile(field), torch.ones(3, 2), torch.linspace(0, 1, 4), method="rk4", adjoint_params=tuple(field.parameters()))
    return solved(field, y)


def solver(compile, solve):
    """A whole solver of fixed steps, compiled."""
    field = Field()
    y = compile(lambda y: solve(field, y, torch.linspace(0, 1, 4), method="rk4"))(torch.ones(3, 2))
    return solved(field, y)


@use("torchdiffeq", graphs=1)
def test_fixed_step_solver(compile):
    from torchdiffeq import odeint
    return solver(compile, odeint)


@use("torchdiffeq", graphs=1)
def test_adjoint_solver(compile):
    from torchdiffeq import odeint_adjoint
    return solver(compile, odeint_adjoint)


@use("torchdiffeq", breaks=11, graphs=10)
def test_adaptive_solver(compile):
    from torchdiffeq import odeint
    field = Field()
    return compile(lambda y: odeint(field, y, torch.linspace(0, 1, 4), method="dopri5"))(torch.ones(3, 2))


@use("torchsde", graphs=4)
def test_sde_field(compile):
    import torchsde
    field = Field()
    field.f, field.g = compile(field.f), compile(field.g)
    y = torchsde.sdeint(field, torch.ones(3, 2), torch.linspace(0, 0.5, 3), dt=0.1, method="euler", bm=torchsde.BrownianInterval(0.0, 0.5, size=(3, 2), entropy=7))
    return solved(field, y)


@use("torchsde", breaks=27, graphs=16)
def test_sde_solver(compile):
    import torchsde
    field = Field()
    solve = compile(lambda y: torchsde.sdeint(field, y, torch.linspace(0, 0.5, 3), dt=0.1, method="euler",
                                              bm=torchsde.BrownianInterval(0.0, 0.5, size=(3, 2), entropy=7)))
    y = solve(torch.ones(3, 2))
    return solved(field, y)


@use("torchode", breaks=6, graphs=7)
def test_parallel_ode(compile):
    import torchode
    field = Field()
    term = torchode.ODETerm(field)
    step, controller = torchode.Dopri5(term=term), torchode.IntegralController(atol=1e-6, rtol=1e-3, term=term)
    solve = compile(torchode.AutoDiffAdjoint(step, controller).solve)
    return solve(torchode.InitialValueProblem(y0=torch.ones(3, 2), t_eval=torch.linspace(0, 1, 5).expand(3, 5))).ys


@use("neuralop", graphs=2)
def test_fourier_operator(compile):
    from neuralop.models import FNO
    model = FNO(n_modes=(4, 4), hidden_channels=8, in_channels=1, out_channels=1, n_layers=2)
    compiled, x = compile(model), torch.randn(2, 1, 8, 8)
    return trained(model, lambda: compiled(x).square().mean())

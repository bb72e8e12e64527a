"""Gaussian processes, Bayesian optimisation, probabilistic programs, flows: gpytorch, botorch, pyro, normflows."""
import torch
from uses import gradients, trained, use


def exact_model(gpytorch, x, y):
    class Model(gpytorch.models.ExactGP):
        def __init__(self):
            super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
    return Model()


@use("gpytorch", breaks=4, graphs=6)
def test_exact_gaussian_process(compile):
    import gpytorch
    x = torch.linspace(0, 1, 12)
    y = torch.sin(6 * x)
    model = exact_model(gpytorch, x, y).train()
    likelihood = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    loss = compile(lambda x, y: -likelihood(model(x), y))
    return trained(model, lambda: loss(x, y))


@use("gpytorch", breaks=7, graphs=8)
def test_predictions(compile):
    import gpytorch
    x = torch.linspace(0, 1, 12)
    model = exact_model(gpytorch, x, torch.sin(6 * x)).eval()
    with torch.no_grad():
        found = compile(lambda x: model(x))(torch.linspace(0.1, 0.9, 5))
        return found.mean, found.variance


@use("gpytorch", graphs=1)
def test_kernel(compile):
    import gpytorch
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=2.5, ard_num_dims=3))
    found = compile(lambda x: kernel(x).to_dense())(torch.randn(6, 3))
    found.sum().backward()
    return found, gradients(kernel)


@use("botorch", breaks=4, graphs=6)
def test_acquisition(compile):
    from botorch.acquisition import LogExpectedImprovement
    from botorch.models import SingleTaskGP
    x = torch.rand(8, 2, dtype=torch.double)
    model = SingleTaskGP(x, x.sum(-1, keepdim=True).sin())
    acquisition = LogExpectedImprovement(model, best_f=0.5)
    at = torch.rand(4, 1, 2, dtype=torch.double, requires_grad=True)
    found = compile(acquisition)(at)
    found.sum().backward()
    return found, at.grad


@use("pyro", breaks=17, graphs=9)
def test_variational_step(compile):
    import pyro
    from pyro import distributions as dist
    from pyro.infer import Trace_ELBO
    pyro.clear_param_store()

    def model(x):
        at = pyro.sample("at", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.Normal(at, 0.5), obs=x)

    def guide(x):
        pyro.sample("at", dist.Normal(pyro.param("loc", torch.tensor(0.3)), 0.2))
    loss = Trace_ELBO().differentiable_loss
    x = torch.randn(10)
    found = compile(lambda x: loss(model, guide, x))(x)
    found.backward()
    return found, pyro.param("loc").grad


@use("normflows", graphs=1)
def test_flow(compile):
    import normflows as nf
    layers = []
    for _ in range(3):
        layers += [nf.flows.AffineCouplingBlock(nf.nets.MLP([1, 16, 2], init_zeros=False)), nf.flows.Permute(2, mode="swap")]
    model = nf.NormalizingFlow(nf.distributions.DiagGaussian(2), layers)
    x, loss = torch.randn(16, 2), compile(model.forward_kld)
    return trained(model, lambda: loss(x))

"""Libraries that live in hooks, under captured backwards: attributions of captum, private training of opacus.  Skipped where they are not installed."""
import pytest
import torch
from torch import nn
from uses import assert_same, seeded

import firesteel as fs


@pytest.fixture(autouse=True)
def _fresh():
    fs.reset()
    yield
    fs.reset()


def check(fn):
    expected = seeded(fn)
    fs.reset()
    with fs.compiled_autograd():
        found = seeded(fn)
    assert_same(found, expected)
    numbers = fs.counters["compiled_autograd"]
    assert numbers["captures"] and not numbers["by_eager"] and not numbers["unknown_order"]


# attribution -> (how it is made of a model, what it is asked beside the inputs)
ATTRIBUTIONS = {
    "IntegratedGradients": ((), {"n_steps": 10}), "Saliency": ((), {}), "InputXGradient": ((), {}), "DeepLift": ((), {}),
    "DeepLiftShap": ((), {"baselines": 3}), "GradientShap": ((), {"baselines": 3, "n_samples": 4, "stdevs": 0.1}),
    "GuidedBackprop": ((), {}), "Deconvolution": ((), {}), "LRP": ((), {}),
    "LayerConductance": ((1,), {"n_steps": 10}), "LayerGradCam": ((1,), {}), "LayerIntegratedGradients": ((0,), {"n_steps": 10})}


@pytest.mark.parametrize("name", ATTRIBUTIONS)
@pytest.mark.filterwarnings("ignore")
def test_attributions(name):
    attr = pytest.importorskip("captum.attr")
    layers, options = ATTRIBUTIONS[name]

    def fn():
        model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(5, 8, requires_grad=True)
        asked = {**options, **({"baselines": torch.randn(options["baselines"], 8)} if "baselines" in options else {})}
        return getattr(attr, name)(model, *(model[place] for place in layers)).attribute(x, target=1, **asked)
    check(fn)


MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), lambda: torch.randn(32, 8)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)),
                    lambda: torch.randn(32, 1, 8, 8)),
    "embedding": (lambda: nn.Sequential(nn.Embedding(10, 8), nn.LayerNorm(8), nn.Flatten(), nn.Linear(40, 3)), lambda: torch.randint(0, 10, (32, 5)))}


@pytest.mark.parametrize("mode", ["hooks", "ew", "functorch", "ghost"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore")
def test_private_training(name, mode):
    opacus = pytest.importorskip("opacus")

    def fn():
        model, data = (make() for make in MODELS[name])
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data, torch.randint(0, 3, (32,))), batch_size=8)
        parts = {"module": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "data_loader": loader}
        if mode == "ghost":
            parts["criterion"] = nn.CrossEntropyLoss()
        model, step, *loss, loader = opacus.PrivacyEngine().make_private(**parts, noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=False,
                                                                        grad_sample_mode=mode)
        samples, losses = [], []
        for x, y in loader:
            step.zero_grad()
            value = (loss[0] if loss else nn.functional.cross_entropy)(model(x), y)
            value.backward()
            samples += [p.grad_sample.clone() for p in model.parameters() if mode != "ghost"]
            step.step()
            losses.append(value.item())
        return [*(p.detach() for p in model.parameters()), samples, torch.tensor(losses)]
    check(fn)

"""Reinforcement learning: tensordict, torchrl."""
import torch
from torch import nn
from uses import gradients, use


@use("tensordict", graphs=1)
def test_tensordict_module(compile):
    from tensordict import TensorDict
    from tensordict.nn import TensorDictModule, TensorDictSequential
    model = TensorDictSequential(TensorDictModule(nn.Linear(4, 8), in_keys=["x"], out_keys=["hidden"]),
                                 TensorDictModule(nn.Linear(8, 2), in_keys=["hidden"], out_keys=["y"]))
    found = compile(model)(TensorDict({"x": torch.randn(3, 4)}, batch_size=[3]))
    found["y"].sum().backward()
    return found["hidden"].detach(), found["y"].detach(), gradients(model)


@use("tensordict", graphs=1)
def test_tensordict_arithmetic(compile):
    from tensordict import TensorDict
    data = TensorDict({"a": torch.randn(3, 4), "b": {"c": torch.randn(3)}}, batch_size=[3])
    found = compile(lambda data: (data * 2).apply(torch.relu).reshape(3, 1))(data)
    return found["a"], found["b", "c"], list(found.batch_size)


def policy_and_value(torchrl):
    from tensordict.nn import NormalParamExtractor, TensorDictModule
    from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
    net = nn.Sequential(MLP(in_features=3, out_features=4, num_cells=[16]), NormalParamExtractor())
    actor = ProbabilisticActor(TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"]), in_keys=["loc", "scale"], distribution_class=TanhNormal,
                               return_log_prob=True)
    return actor, ValueOperator(MLP(in_features=3, out_features=1, num_cells=[16]), in_keys=["observation"])


@use("torchrl", graphs=1)
def test_policy_loss(compile):
    import torchrl
    from tensordict import TensorDict
    from torchrl.objectives import ClipPPOLoss
    actor, value = policy_and_value(torchrl)
    loss = ClipPPOLoss(actor, value)
    data = TensorDict({"observation": torch.randn(6, 3), "action": torch.rand(6, 2) - 0.5, "action_log_prob": torch.randn(6), "advantage": torch.randn(6, 1),
                       "value_target": torch.randn(6, 1)}, batch_size=[6])
    found = compile(loss)(data)
    total = sum(found[name] for name in found.keys() if name.startswith("loss_"))      # noqa: SIM118  a TensorDict
    total.backward()
    return {name: found[name].detach() for name in sorted(found.keys()) if name.startswith("loss_")}, gradients(loss)       # noqa: SIM118


@use("torchrl", graphs=1)
def test_advantages(compile):
    from torchrl.objectives.value.functional import generalized_advantage_estimate
    shape = 2, 5, 1
    return compile(lambda a, b, c, done: generalized_advantage_estimate(0.99, 0.95, a, b, c, done, done))(*(torch.randn(shape) for _ in range(3)), torch.rand(shape) > 0.7)


@use("torchrl", breaks=4, graphs=6)
def test_policy_step(compile):
    """Advantages, loss, gradients and the optimiser's step in one compiled function."""
    import torchrl
    from tensordict import TensorDict
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE
    actor, value = policy_and_value(torchrl)
    loss, advantage = ClipPPOLoss(actor, value), GAE(gamma=0.99, lmbda=0.95, value_network=value)
    optimizer = torch.optim.Adam(loss.parameters(), 1e-3)

    def step(data):
        with torch.no_grad():
            advantage(data)
        found = loss(data)
        total = found["loss_objective"] + found["loss_critic"] + found["loss_entropy"]
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        return total.detach()
    flags, compiled = torch.zeros(6, 1, dtype=torch.bool), compile(step)
    losses = []
    for _ in range(2):
        data = TensorDict({"observation": torch.randn(6, 3), "action": torch.rand(6, 2) - 0.5, "action_log_prob": torch.randn(6),
                           "next": {"observation": torch.randn(6, 3), "reward": torch.randn(6, 1), "done": flags, "terminated": flags}}, batch_size=[6])
        losses.append(compiled(data))
    return losses, [p.detach() for p in loss.parameters()]

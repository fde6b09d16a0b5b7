"""The optimizer and its learning rate, which is a pure function of the step: there is no state to save."""

from torch import nn
from torch.optim import Optimizer

from seqpar.launch.optimization.optimizers import OptimizerOptions
from seqpar.launch.optimization.schedules import SCHEDULES, Moment
from seqpar.launch.optimization.table import OPTIMIZERS
from seqpar.launch.settings.config import Config


def make_optimizer(config: Config, net: nn.Module) -> Optimizer:
    """Returns the optimizer; weight decay acts on matrices and kernels, on the rest only with ``--decay-all``."""
    decayed = [p for name, p in net.named_parameters() if config.decay_all or (p.ndim > 1 and "pos_embed" not in name)]
    decayed_ids = {id(p) for p in decayed}
    others = [p for p in net.parameters() if id(p) not in decayed_ids]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    kind = OPTIMIZERS[config.optimizer]
    betas = (config.betas or kind.betas)[: len(kind.betas)]
    return kind.make(groups, OptimizerOptions(config.lr, betas, config.amsgrad))


def learning_rate(config: Config, step: int) -> float:
    """Returns the learning rate of a step: linear warm-up, then the schedule."""
    warmup_steps = config.warmup * config.iterations
    if step < warmup_steps:
        return config.lr * (step + 1) / warmup_steps
    decay_steps = config.decay_epochs * config.iterations
    moment = Moment(
        step - warmup_steps, config.steps - warmup_steps, decay_steps, config.decay_factor, config.iterations
    )
    return config.lr * SCHEDULES[config.schedule](moment)


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Sets the rate of all of the optimizer's groups."""
    for group in optimizer.param_groups:
        group["lr"] = rate

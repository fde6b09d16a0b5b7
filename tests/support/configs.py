"""Configs, networks and trainers of command lines, for the tests."""

from seqpar.models.build import build_network
from seqpar.parallel.mesh import Group
from seqpar.planner.batch_size import choose_batch
from seqpar.runs.run_folder import describe_run
from seqpar.runs.run_status import StatusFile
from seqpar.settings.command_line import parse
from seqpar.settings.config import Config
from seqpar.tasks.segment.data import open_data
from seqpar.training import trainer as training


def config_of(flags: list[str], *more: str) -> Config:
    return choose_batch(parse([*flags, *more], "debug")[1])


def net_of(config: Config):
    return build_network(config, 1, 2, Group("seq", tuple(range(config.seqpar))), "meta")


def trainer_of(config: Config, mesh, folder):
    material = open_data(config, True)
    net = build_network(config, material.num_channels, material.num_outputs, mesh.seq)
    description = describe_run(config, "", {"digests": material.digests()}, {})
    return training.Trainer(config, mesh, material, net, StatusFile(folder), description)


class NoStop:
    """A stopper that never stops."""

    def should_leave(self) -> bool:
        return False

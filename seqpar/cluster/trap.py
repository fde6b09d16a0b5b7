"""What a trap is: something known to be wrong or slow, found in a process's environment and in facts about it."""

from collections.abc import Mapping
from dataclasses import dataclass

Env = Mapping[str, str]


@dataclass(frozen=True)
class Facts:
    """Facts about a process, besides its environment, that a trap depends on."""

    on_gpu: bool = False
    on_cpu: bool = False  # the user chose the CPU
    rocm: bool = False
    num_gpus: int = 0  # visible to this process
    num_nodes: int = 1
    local_world: int = 1
    cores: int = 1  # this process may use
    host_cores: int = 1
    threads: int = 1  # of torch
    slingshot: bool = False
    kernel: tuple[int, int] = (6, 0)
    launch_warning: str = ""  # of the way ranks were started
    torch: tuple[int, int, int] = (2, 13, 0)
    has_run_folder: bool = False  # which keeps what was searched for
    cudnn: int = 0  # as torch numbers it, 91002 for 9.10.2; 0: none


@dataclass(frozen=True)
class Trap:
    """What is wrong and how to cure it; with an ``error`` the job cannot succeed."""

    text: str
    error: bool = False

    def __str__(self) -> str:
        return f"{'error' if self.error else 'warning'}: {self.text}"

"""Known traps of torch, cuDNN, NCCL, MIOpen and of clusters, with their remedies."""

from collections.abc import Callable, Mapping, Sequence
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
    expandable: bool | None = None  # the allocator's segments grow; None: not known
    cudnn: int = 0  # as torch numbers it, 91002 for 9.10.2; 0: none


@dataclass(frozen=True)
class Trap:
    """What is wrong and how to cure it; with an ``error`` the job cannot succeed."""

    text: str
    error: bool = False

    def __str__(self) -> str:
        return f"{'error' if self.error else 'warning'}: {self.text}"


FIXED_DETAIL = (2, 13, 0)  # from here on torch's debug wrapper was read and keeps messages of a batch together


def half_convolutions(env: Env, facts: Facts) -> Trap | None:
    """Returns what is wrong with convolutions of volumes in half precision, by the versions of torch and cuDNN.

    cuDNN 9.8 to 9.10 returns wrong numbers for very large volumes. torch 2.9.0 goes round cuDNN whatever its version,
    later ones where cuDNN is older than 9.15: with 3 to 17 times the memory, at a quarter of the speed.
    """
    if facts.rocm or not facts.on_gpu or not facts.cudnn:
        return None
    release, cudnn = ".".join(map(str, facts.torch)), f"{facts.cudnn // 10000}.{facts.cudnn // 100 % 100}"
    pair = f"torch {release} with cuDNN {cudnn}"
    if facts.torch < (2, 9, 0) and 90800 <= facts.cudnn < 91100:
        return Trap(
            f"{pair} returns wrong numbers for bf16 convolutions of very large volumes: pip install "
            "'nvidia-cudnn-cu12>=9.15', or torch 2.11 or newer",
            error=True,
        )
    if facts.torch == (2, 9, 0):
        return Trap(f"{pair} runs bf16 convolutions of volumes without cuDNN, slowly and in up to 17 times the memory: "
                    "use torch 2.8 with --precision fp32, or 2.11 or newer")  # fmt: skip
    if facts.torch > (2, 9, 0) and facts.cudnn < 91500:
        return Trap(f"{pair} runs bf16 convolutions of volumes without cuDNN, slowly and in up to 17 times the memory: "
                    "pip install 'nvidia-cudnn-cu12>=9.15' (cu13 with CUDA 13)")  # fmt: skip
    return None


def _detail(env: Env, facts: Facts) -> Trap | None:
    if env.get("TORCH_DISTRIBUTED_DEBUG", "").upper() != "DETAIL" or not facts.on_gpu or facts.torch >= FIXED_DETAIL:
        return None
    return Trap(
        "TORCH_DISTRIBUTED_DEBUG=DETAIL may send the messages of a batch one by one before it receives any, and so "
        "hang: unset it, and use --debug-collectives"
    )


def _hardware_queues(env: Env, facts: Facts) -> Trap | None:
    queues = env.get("GPU_MAX_HW_QUEUES", "4")
    if not (facts.rocm and facts.on_gpu) or facts.local_world < 2 or not queues.isdigit() or int(queues) >= 8:
        return None
    return Trap(
        f"GPU_MAX_HW_QUEUES is {queues}: computing, the messages of three groups and sharded weights share {queues} "
        "queues, and wait for each other without need: export GPU_MAX_HW_QUEUES=8"
    )


def _lost_database(env: Env, facts: Facts) -> Trap | None:
    folder = env.get("MIOPEN_USER_DB_PATH", "")
    if not (facts.rocm and facts.on_gpu) or not folder.startswith(("/tmp", "/dev/shm")):
        return None
    if facts.has_run_folder or "SLURM_JOB_ID" not in env:
        return None
    return Trap(
        f"MIOPEN_USER_DB_PATH={folder} is lost with the job, and the next one searches for its kernels again, for "
        "minutes: give doctor and train --out, the run folder, where a copy is kept, or export a folder that stays"
    )


LIBRARY_TRAPS: Sequence[Callable[[Env, Facts], Trap | None]] = (
    half_convolutions,
    _detail,
    _hardware_queues,
    _lost_database,
)


def _two_masks(env: Env, facts: Facts) -> Trap | None:
    others = [name for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if env.get(name)]
    if not env.get("ROCR_VISIBLE_DEVICES") or not others:
        return None
    return Trap(
        f"ROCR_VISIBLE_DEVICES and {others[0]} are both set: the second counts among GPUs that the first leaves, and "
        f"torch may see no GPU. Unset {' and '.join(others)}",
        error=facts.num_gpus == 0 and not facts.on_cpu,
    )


def _no_gpu(env: Env, facts: Facts) -> Trap | None:
    granted = [name for name in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "ROCR_VISIBLE_DEVICES") if env.get(name)]
    if facts.num_gpus or facts.on_cpu or not granted:
        return None
    return Trap(
        f"the scheduler granted GPUs ({granted[0]}={env[granted[0]]}) and torch sees none: load the ROCm or CUDA "
        "module that this torch was built for",
        error=True,
    )


def _sockets(env: Env, facts: Facts) -> Trap | None:
    if not (facts.rocm and facts.on_gpu) or facts.num_nodes < 2:
        return None
    if env.get("NCCL_NET", "").lower() == "socket":
        return Trap("NCCL_NET=Socket sends everything between nodes over TCP: unset it, or set NCCL_NET=OFI")
    places = ("NCCL_NET_PLUGIN", "LOADEDMODULES", "LD_LIBRARY_PATH")
    if any(word in env.get(name, "") for name in places for word in ("rccl-net", "ofi")):
        return None
    return Trap(
        "RCCL has no network plugin here, and without one it silently uses TCP, at a tenth of the speed: module load "
        "rccl-net-plugin (after rocm), and set NCCL_NET=OFI, which fails instead of falling back"
    )


def _gdr(env: Env, facts: Facts) -> Trap | None:
    if env.get("NCCL_NET_GDR_LEVEL") != "PHB" or not facts.rocm or facts.num_nodes < 2:
        return None
    return Trap("NCCL_NET_GDR_LEVEL=PHB has hung jobs on several nodes with ROCm 7: if this one hangs, unset it")


def _memhooks(env: Env, facts: Facts) -> Trap | None:
    if env.get("FI_MR_CACHE_MONITOR") != "memhooks":
        return None
    return Trap("FI_MR_CACHE_MONITOR=memhooks deadlocks: set it to kdreg2 or userfaultfd", error=True)


def _expandable(env: Env, facts: Facts) -> Trap | None:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    variables = [name for name in names if "expandable_segments:true" in env.get(name, "").lower()]
    if variables and facts.rocm:
        return Trap(f"{variables[0]} asks for expandable_segments, which has hung ROCm: take it out")
    if variables and facts.expandable is False:
        return Trap(
            f"{variables[0]} asks for expandable_segments, but the allocator does not use them, and memory may "
            "fragment: set the variable before anything uses the GPU"
        )
    return None


def _threads(env: Env, facts: Facts) -> Trap | None:
    fits = max(1, min(facts.cores, facts.host_cores // max(1, facts.local_world)))
    if facts.threads <= fits:
        return None
    setting = f"OMP_NUM_THREADS={env['OMP_NUM_THREADS']}" if "OMP_NUM_THREADS" in env else "OMP_NUM_THREADS is not set"
    return Trap(
        f"{setting}: each rank computes with {facts.threads} threads where {fits} cores are its share ({facts.cores} "
        f"allowed, {facts.host_cores} on the node, {facts.local_world} ranks on it): export OMP_NUM_THREADS={fits}"
    )


def _one_core(env: Env, facts: Facts) -> Trap | None:
    if facts.cores > 1 or facts.host_cores < 2 * facts.local_world or not facts.on_gpu:
        return None
    by = " (torchrun inside Slurm does this)" if "TORCHELASTIC_RUN_ID" in env and "SLURM_JOB_ID" in env else ""
    return Trap(
        f"this rank may use one core of {facts.host_cores}{by}, and its loader shares it: start ranks with "
        "srun -c <cores per rank>"
    )


def _absent_srun(env: Env, facts: Facts) -> Trap | None:
    return Trap(facts.launch_warning, error=True) if facts.launch_warning else None


def _never_ends(env: Env, facts: Facts) -> Trap | None:
    names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
    switched_off = [name for name in names if env.get(name) == "0"]
    if not switched_off:
        return None
    return Trap(f"{switched_off[0]}=0: a rank that hangs is never ended, and the allocation runs out: unset it")


def _channels_per_peer(env: Env, facts: Facts) -> Trap | None:
    if env.get("NCCL_NCHANNELS_PER_PEER") != "32":
        return None
    return Trap("NCCL_NCHANNELS_PER_PEER=32 has made gradients wrong: unset it")


def _kernel_cache(env: Env, facts: Facts) -> Trap | None:
    if not (facts.rocm and facts.on_gpu) or facts.local_world < 2 or env.get("MIOPEN_USER_DB_PATH"):
        return None
    return Trap(
        "MIOPEN_USER_DB_PATH is not set, so all ranks write to one database in the home folder: export it, and "
        "MIOPEN_CUSTOM_CACHE_DIR, as a folder for each rank in /tmp"
    )


def _interfaces(env: Env, facts: Facts) -> Trap | None:
    missing = [name for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if not env.get(name)]
    if not facts.slingshot or facts.num_nodes < 2 or not missing:
        return None
    return Trap(f"{' and '.join(missing)} not set on Slingshot: export {' '.join(f'{name}=hsn0' for name in missing)}")


def _fork(env: Env, facts: Facts) -> Trap | None:
    if not facts.slingshot or facts.kernel >= (5, 12) or env.get("CXI_FORK_SAFE"):
        return None
    return Trap("this kernel is older than 5.12, and loader processes may damage RDMA memory: export CXI_FORK_SAFE=1")


TRAPS: Sequence[Callable[[Env, Facts], Trap | None]] = (
    _absent_srun,
    _no_gpu,
    _two_masks,
    _sockets,
    _gdr,
    _memhooks,
    _expandable,
    _interfaces,
    _threads,
    _one_core,
    _never_ends,
    _channels_per_peer,
    _kernel_cache,
    _fork,
    *LIBRARY_TRAPS,
)


def find_traps(env: Env, facts: Facts) -> list[Trap]:
    """Returns the traps that apply, errors first."""
    traps = [trap for check in TRAPS if (trap := check(env, facts)) is not None]
    return sorted(traps, key=lambda trap: not trap.error)

"""Detects how this process was started from the variables of torchrun, Slurm, OpenMPI or PMI; does not import torch.

A Slurm step is recognised by its own variables: the batch shell and an ``salloc`` shell carry the job's
``SLURM_NTASKS``, and a process that relied on it would wait for ranks that nobody started.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from zlib import crc32

FIRST_SPECIAL_STEP = 0xFFFFFFF0  # batch, interactive and extern steps are numbered from here on
MEETING = "SEQPAR_MEETING"  # names a meeting of these ranks at the store of the process that started them
SHARE_GPU = "SEQPAR_SHARE_GPU"  # 1: several ranks may share a GPU, to test what they compute
OWN_SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"  # 1: NCCL 2.30 or later supports shared GPUs itself
ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"  # the second until torch 2.8
MIOPEN_NHWC = "PYTORCH_MIOPEN_SUGGEST_NHWC"  # 1: MIOpen takes tensors with channels last as they are, 0: it copies them
MOST_PORTS = 65_535
LAZY_GROUPS = "SEQPAR_LAZY_GROUPS"  # 1: a group connects at its first message, so that groups connect concurrently


@dataclass(frozen=True)
class Launcher:
    """Which launcher started this process, its rank, and where all ranks meet."""

    by: str
    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    num_nodes: int = 1
    address: str = "127.0.0.1"
    port: int = 29500
    agent_store: bool = False  # another process (torchrun's agent, or that of the folds) hosts the store
    attempt: int = 0
    warning: str = ""
    host: str = ""  # the launcher's own name for this node, if it has one
    job: str = ""  # distinguishes these processes from those of another job at the same port


def read_launcher(env: Mapping[str, str]) -> Launcher:
    """Detects how this process was started: torchrun's variables come before a Slurm step's, and those before MPI's.

    Inside Slurm, ``mpirun`` starts its daemons with srun, and the ranks inherit their step's numbers: if MPI's numbers
    differ from the step's, MPI's are right.
    """
    launcher = _read(env)
    if launcher.world > 1 and not 1 <= launcher.port <= MOST_PORTS:
        raise ValueError(f"MASTER_PORT={launcher.port} is no port: it must be in 1…{MOST_PORTS}, such as 29500")
    if not env.get(MEETING):
        return launcher
    return replace(launcher, job=f"{launcher.job}.{env[MEETING]}", agent_store=True)


def _read(env: Mapping[str, str]) -> Launcher:
    if "RANK" in env or "WORLD_SIZE" in env:
        return _from_torchrun(env)
    mpi = next((kind for kind in _MPI if kind[1] + "SIZE" in env and kind[1] + "RANK" in env), None)
    step = env.get("SLURM_STEP_ID", "")
    if step.isdigit() and int(step) < FIRST_SPECIAL_STEP:
        launcher = _from_slurm_step(env, int(step))
        if mpi is None or (_number(env, mpi[1] + "RANK"), _number(env, mpi[1] + "SIZE")) == (
            launcher.rank,
            launcher.world,
        ):
            return launcher
    return _from_mpi(env, *mpi) if mpi else Launcher("alone", warning=_absent_srun(env))


# launcher, prefix of its rank and size, names of the local rank, names of the local size
_MPI = (
    ("openmpi", "OMPI_COMM_WORLD_", ("OMPI_COMM_WORLD_LOCAL_RANK",), ("OMPI_COMM_WORLD_LOCAL_SIZE",)),
    ("pmi", "PMI_", ("PALS_LOCAL_RANKID", "MPI_LOCALRANKID"), ("PALS_LOCAL_SIZE", "MPI_LOCALNRANKS")),
)
# variables in which MPI launchers number their runs, so that two runs on one machine do not meet
_MPI_JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PALS_APID", "PMI_JOBID")


def _from_torchrun(env: Mapping[str, str]) -> Launcher:
    for name in ("RANK", "WORLD_SIZE"):
        if name not in env:
            other = "WORLD_SIZE" if name == "RANK" else "RANK"
            raise ValueError(f"{other} is set but {name} is not: set both or neither, or start with torchrun")
    rank, world = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    if world < 1:
        raise ValueError(f"WORLD_SIZE={world}: it must be at least 1: remove it and RANK, or start with torchrun")
    if not 0 <= rank < world:
        raise ValueError(f"RANK={rank} does not fit WORLD_SIZE={world}: it must be in 0…{world - 1}")
    if world > 1 and ("MASTER_ADDR" not in env or "MASTER_PORT" not in env):
        raise ValueError(f"WORLD_SIZE={world} needs MASTER_ADDR and MASTER_PORT: set both, or start with torchrun")
    if (local_world := _number(env, "LOCAL_WORLD_SIZE", world)) < 1:
        raise ValueError(f"LOCAL_WORLD_SIZE={local_world}: it must be at least 1: remove it, or start with torchrun")
    return Launcher(
        by="torchrun" if "TORCHELASTIC_RUN_ID" in env else "variables",
        rank=rank,
        world=world,
        local_rank=_number(env, "LOCAL_RANK", rank % local_world),
        local_world=local_world,
        num_nodes=-(-world // local_world),
        address=env.get("MASTER_ADDR", "127.0.0.1"),
        port=_number(env, "MASTER_PORT", 29500),
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_number(env, "TORCHELASTIC_RESTART_COUNT", 0),
    )


def _from_slurm_step(env: Mapping[str, str], step: int) -> Launcher:
    world = _number(env, "SLURM_STEP_NUM_TASKS")
    node, per_node = _number(env, "SLURM_NODEID", 0), env.get("SLURM_STEP_TASKS_PER_NODE", "")
    counts = tasks_per_node(per_node)
    job = _number(env, "SLURM_JOB_ID", 0)
    num_nodes = _number(env, "SLURM_STEP_NUM_NODES", max(len(counts), 1))
    first = first_host(env.get("SLURM_STEP_NODELIST", "")) if num_nodes > 1 else ""
    return Launcher(
        by="slurm",
        rank=_number(env, "SLURM_PROCID"),
        world=world,
        local_rank=_number(env, "SLURM_LOCALID", 0),
        local_world=counts[node] if node < len(counts) else world,
        num_nodes=num_nodes,
        address=env.get("MASTER_ADDR") or first or "127.0.0.1",
        port=_number(env, "MASTER_PORT", _port(job, step)),
        attempt=_number(env, "SLURM_RESTART_COUNT", 0),
        host=env.get("SLURMD_NODENAME", ""),
        job=f"{job}.{step}",
    )


def _from_mpi(
    env: Mapping[str, str], by: str, prefix: str, local_ranks: Sequence[str], local_sizes: Sequence[str]
) -> Launcher:
    rank, world = _number(env, prefix + "RANK"), _number(env, prefix + "SIZE")
    if not 0 <= rank < world:
        raise ValueError(f"{prefix}RANK={rank} does not fit {prefix}SIZE={world}: it must be in 0…{world - 1}")
    local_world = next((_number(env, name) for name in local_sizes if name in env), world)
    local_rank = next((_number(env, name) for name in local_ranks if name in env), rank % local_world)
    if local_world < world and "MASTER_ADDR" not in env:
        raise ValueError(
            f"{by} started {world} ranks on several nodes but does not tell them where to meet: "
            "export MASTER_ADDR=<host of rank 0> (and MASTER_PORT), or start with srun or torchrun"
        )
    job = next((env[name] for name in (*_MPI_JOBS, "SLURM_JOB_ID") if env.get(name)), "")
    return Launcher(
        by,
        rank,
        world,
        local_rank,
        local_world,
        num_nodes=-(-world // local_world),
        address=env.get("MASTER_ADDR", "127.0.0.1"),
        port=_number(env, "MASTER_PORT", _port(crc32(job.encode()), 0)),
        job=job,
    )


def _absent_srun(env: Mapping[str, str]) -> str:
    tasks, nodes = env.get("SLURM_NTASKS", "1"), env.get("SLURM_JOB_NUM_NODES", "1")
    if "SLURM_JOB_ID" not in env:
        return ""
    if tasks.isdigit() and int(tasks) > 1:
        granted, count = f"{tasks} tasks", tasks
    elif nodes.isdigit() and int(nodes) > 1:
        granted, count = f"{nodes} nodes", "<ranks>"
    else:
        return ""
    return (
        f"Slurm granted {granted} to job {env['SLURM_JOB_ID']}, but this process was started without srun "
        f"and runs alone; start all ranks with: srun -n {count} python ..."
    )


def flight_recorder(env: Mapping[str, str], folder: str, torch_version: str) -> dict[str, str]:
    """Returns the variables, except those set in ``env``, that make NCCL record its last collectives.

    When a collective times out, NCCL writes the record into ``folder``; read it with ``python -m
    torch.distributed.flight_recorder.fr_trace``. Two of the variables were renamed, and newer versions of torch warn
    about the old names.
    """
    renamed = _release(torch_version) >= (2, 9)
    settings = {("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): "2000", ("TORCH_NCCL_DUMP_ON_TIMEOUT",): "1"}
    if folder:
        prefix = os.path.join(os.path.abspath(folder), "flight_rank_")
        settings["TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] = prefix
    unset = {names: value for names, value in settings.items() if not any(name in env for name in names)}
    return {name: value for names, value in unset.items() for name in (names[:1] if renamed else names)}


def shared_gpu_settings(env: Mapping[str, str], rank: int) -> dict[str, str]:
    """Returns the variables, except those set in ``env``, that let ranks share a GPU under NCCL.

    Each rank then appears to be on its own host, so that all traffic goes through sockets: correct but slow. Returns
    nothing if NCCL is asked to support shared GPUs itself.
    """
    if env.get(OWN_SHARING) == "1":
        return {}
    settings = {"NCCL_HOSTID": str(rank), "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0"}
    settings |= dict.fromkeys(("NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"), "1")
    return {name: value for name, value in settings.items() if name not in env}


def gpu_settings(env: Mapping[str, str], torch_version: str, rocm: bool) -> dict[str, str]:
    """Returns the variables, except those set in ``env``, that torch reads once, before the first work on a GPU.

    On NVIDIA, segments that grow keep memory from fragmenting; they have caused hangs on ROCm. Their variable was
    renamed. On AMD, MIOpen takes volumes with channels last without a copy: some versions of torch do so by default and
    others do not. It also takes those with channels first, so the doctor can time both.
    """
    if rocm:
        return {} if env.get(MIOPEN_NHWC) in ("0", "1") else {MIOPEN_NHWC: "1"}  # torch ignores other values
    if any(name in env for name in ALLOCATOR):
        return {}
    return {ALLOCATOR[0 if _release(torch_version) >= (2, 9) else 1]: "expandable_segments:True"}


def _release(torch_version: str) -> tuple[int, int]:
    major, minor = (int(piece) for piece in torch_version.split(".")[:2])
    return major, minor


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    if name not in env:
        if default is None:
            raise ValueError(f"{name} is not set, but other variables of the launcher are")
        return default
    try:
        return int(env[name])
    except ValueError:
        raise ValueError(f"{name}={env[name]!r} is not a number") from None


def _port(job: int, step: int) -> int:
    return 15000 + (job * 7 + step * 131) % 15000  # below the ephemeral ports, different for steps of one job


def tasks_per_node(text: str) -> list[int]:
    """Parses Slurm's ``8(x2),4`` to ``[8, 8, 4]``."""
    counts: list[int] = []
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(repeat or 1)
    return counts


def first_host(nodelist: str) -> str:
    """Returns the first host of a Slurm node list such as ``frontier[00012-00015,00020],login1``."""
    match = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\])?([^,\[]*)", nodelist)
    return "".join(piece or "" for piece in match.groups()) if match else ""

"""Known traps of torch, cuDNN, NCCL and MIOpen, and their remedies, as pure functions."""

from collections.abc import Callable, Sequence

from seqpar.cluster.trap import Env, Facts, Trap

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
            "'nvidia-cudnn-cu12>=9.15', or torch 2.10 or newer",
            error=True,
        )
    if facts.torch == (2, 9, 0):
        return Trap(f"{pair} runs bf16 convolutions of volumes without cuDNN, slowly and in up to 17 times the memory: "
                    "use torch 2.8 with --precision fp32, or 2.10 or newer")  # fmt: skip
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


def _layout_flag(env: Env, facts: Facts) -> Trap | None:
    if not (facts.rocm and facts.on_gpu) or env.get("PYTORCH_MIOPEN_SUGGEST_NHWC"):
        return None
    return Trap(
        "PYTORCH_MIOPEN_SUGGEST_NHWC is not set, so that MIOpen copies volumes with channels last to channels first "
        "and back: export PYTORCH_MIOPEN_SUGGEST_NHWC=1, or 0 where the convolutions above are quicker so"
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
    _layout_flag,
    _lost_database,
)

"""What a job searched for is there for the next one, on the new node's empty disk."""

from pathlib import Path

from seqpar.cluster.torch_setup import restore_kernel_cache, save_kernel_cache


def test_kernels_that_a_job_searched_for_are_there_for_the_next_one(tmp_path: Path) -> None:
    run, first, second = tmp_path / "run", tmp_path / "first", tmp_path / "second"
    (first / "gfx90a").mkdir(parents=True)
    (first / "gfx90a" / "found.txt").write_text("kernel 7")
    save_kernel_cache(run, {})
    restore_kernel_cache(run, {"MIOPEN_USER_DB_PATH": str(second)})
    assert not run.exists() and not second.exists()
    save_kernel_cache(run, {"MIOPEN_USER_DB_PATH": str(first)})
    restore_kernel_cache(run, {"MIOPEN_USER_DB_PATH": str(second)})
    assert (second / "gfx90a" / "found.txt").read_text() == "kernel 7"
    (second / "gfx90a" / "found.txt").write_text("kernel 8")
    restore_kernel_cache(run, {"MIOPEN_USER_DB_PATH": str(second)})  # its own are newer
    assert (second / "gfx90a" / "found.txt").read_text() == "kernel 8"
    assert [path.name for path in run.rglob("*") if path.is_file()] == ["found.txt"]

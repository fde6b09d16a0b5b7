"""What a job searched for is there for the next one, on the new node's empty disk."""

from pathlib import Path

from seqpar.cluster.torch_setup import bring_kernels, keep_kernels


def test_kernels_that_a_job_searched_for_are_there_for_the_next_one(tmp_path: Path) -> None:
    run, first, second = tmp_path / "run", tmp_path / "first", tmp_path / "second"
    (first / "gfx90a").mkdir(parents=True)
    (first / "gfx90a" / "found.txt").write_text("kernel 7")
    keep_kernels(run, {})
    bring_kernels(run, {"MIOPEN_USER_DB_PATH": str(second)})
    assert not run.exists() and not second.exists()
    keep_kernels(run, {"MIOPEN_USER_DB_PATH": str(first)})
    bring_kernels(run, {"MIOPEN_USER_DB_PATH": str(second)})
    assert (second / "gfx90a" / "found.txt").read_text() == "kernel 7"
    (second / "gfx90a" / "found.txt").write_text("kernel 8")
    bring_kernels(run, {"MIOPEN_USER_DB_PATH": str(second)})  # its own are newer
    assert (second / "gfx90a" / "found.txt").read_text() == "kernel 8"
    assert [path.name for path in run.rglob("*") if path.is_file()] == ["found.txt"]

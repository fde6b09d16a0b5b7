"""A journal is followed while it is written, and read anew where a training that goes on has rewritten it."""

from pathlib import Path

from seqpar.runs.metrics_tail import MetricsTail


def test_new_rows_come_once_whole_and_anew_after_the_file_was_replaced(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.read() == []
    path.write_text('{"step": 0}\nbroken\n{"step": 1}\n{"st')
    assert [row["step"] for row in tail.read()] == [0, 1]
    with path.open("a") as file:
        file.write('ep": 2}\n')
    assert [row["step"] for row in tail.read()] == [2] and tail.read() == []
    other = tmp_path / "other"
    other.write_text('{"step": 0}\n{"step": 5}\n{"step": 6}\n{"step": 7}\n{"step": 8}\n')
    other.replace(path)
    assert [row["step"] for row in tail.read()] == [0, 5, 6, 7, 8]

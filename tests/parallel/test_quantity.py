"""Numbers and their nouns, as people read them."""

from seqpar.text import quantity


def test_one_has_no_plural() -> None:
    assert [quantity(number, "rank") for number in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert quantity(2, "micro-batch") == "2 micro-batches" and quantity(10, "epoch") == "10 epochs"
    assert quantity(78300, "step", ",") == "78,300 steps"

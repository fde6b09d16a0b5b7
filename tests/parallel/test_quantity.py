"""Numbers and their nouns, as people read them."""

import math

from seqpar.text import list_modalities, millilitres, name_images, quantity


def test_one_has_no_plural() -> None:
    assert [quantity(number, "rank") for number in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert quantity(2, "micro-batch") == "2 micro-batches" and quantity(10, "epoch") == "10 epochs"
    assert quantity(78300, "step", ",") == "78,300 steps"


def test_volumes_of_a_litre_are_written_without_an_exponent() -> None:
    written = {0.0: "0", 0.1254: "0.125", 9.876: "9.88", 99.96: "100", 934.2: "934", 1003.1: "1003", 1042.42: "1042"}
    assert {volume: millilitres(volume) for volume in written} == written and millilitres(math.nan) == "nan"


def test_modalities_without_a_name_are_images() -> None:
    alone, several, named = ["channel 0"], ["channel 0", "channel 1"], ["T1", "channel 1"]
    assert [name_images(names) for names in (alone, several, named)] == [["image"], ["image 1", "image 2"], named]
    assert (list_modalities(alone), list_modalities(several)) == ("1, unnamed", "2, unnamed")
    assert list_modalities(named) == "T1, channel 1"

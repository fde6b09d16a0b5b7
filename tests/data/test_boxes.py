"""Boxes of voxels: the smallest around a mask, cut out and put back, read of an array."""

import numpy as np
import pytest
import torch

from seqpar.data.boxes import crop, read_box, smallest_box, uncrop


def test_a_smallest_box_is_cut_out_and_put_back() -> None:
    image = np.zeros((2, 7, 6, 5), np.float32)
    image[0, 2, 3, 1], image[1, 4, 1, 4] = 1, -1
    box = smallest_box((image != 0).any(0))
    assert box == ((2, 5), (1, 4), (1, 5))
    np.testing.assert_array_equal(uncrop(crop(image, box), box, (7, 6, 5)), image)
    assert uncrop(crop(image, box), box, (7, 6, 5), fill=9)[0, 0, 0, 0] == 9


@pytest.mark.parametrize("shape", [(4,), (4, 3), (2, 3, 4, 5)])
def test_an_empty_mask_is_kept_whole_in_any_number_of_dims(shape) -> None:
    mask = np.zeros(shape, bool)
    assert smallest_box(mask) == tuple((0, side) for side in shape)
    mask[(-1,) * len(shape)] = True
    assert smallest_box(mask) == tuple((side - 1, side) for side in shape)


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_a_box_is_copied_whatever_part_of_it_lies_inside(kind) -> None:
    array = np.arange(1, 2 * 6 * 5 + 1).reshape(2, 6, 5)
    wide = np.pad(array, [(0, 0), (20, 20), (20, 20)], constant_values=-1)
    for low in range(-8, 8):
        for size in (1, 4, 9):
            box = read_box(kind(array), (low, -low), (size, size), -1)
            assert isinstance(box, type(kind(array)))
            assert np.array_equal(box, wide[:, 20 + low : 20 + low + size, 20 - low : 20 - low + size])
            assert not np.shares_memory(np.asarray(box), array)

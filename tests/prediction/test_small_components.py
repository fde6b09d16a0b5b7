"""Connected components below a size are removed, in label maps and in files."""

from dataclasses import replace

import numpy as np
import pytest

from seqpar.scores.postprocessing import Learned, drop_small_components, parse_min_component
from tests.support.folders import save, write_json
from tests.support.predictions import RECIPE, act, make_run, voxels


def test_small_components_become_background() -> None:
    ids = np.zeros((9, 9, 9), np.int16)
    ids[0:2, 0:2, 0:2], ids[2, 2, 2], ids[5, 5, 5], ids[7:9, 7:9, 8] = 1, 1, 1, 2
    left = drop_small_components(ids, 4)
    assert left[2, 2, 2] == 1 and left[5, 5, 5] == 0 and (left == 2).sum() == 4 and (left == 1).sum() == 9
    assert (drop_small_components(ids, 5) == 2).sum() == 0 and np.array_equal(drop_small_components(ids, 1), ids)
    assert [parse_min_component(text, 0.5) for text in ("0", "50", "50mm3", "20voxels", "0.7")] == [0, 100, 100, 20, 2]


REGIONS = {"WT": (1, 2, 3), "TC": (1, 3), "ET": (3,)}


def test_a_small_component_of_a_region_costs_no_other_region_a_voxel() -> None:
    """Class ids 1 NCR, 2 ED, 3 ET: an island gets the label of what encloses it, background only where nothing does."""
    ids = np.zeros((16, 12, 12), np.uint8)
    ids[1:13, 1:11, 1:11], ids[4:9, 4:9, 4:9] = 2, 1  # ED around NCR
    ids[6, 6, 6] = 3  # ET in the core: TC keeps the voxel
    ids[2, 2, 2:4] = 3  # ET in the oedema: a core of two voxels, WT alone keeps them
    ids[11, 2, 2] = 1  # the same without ET
    ids[15, 11, 10:12] = (3, 1)  # a tumour of two voxels
    left = drop_small_components(ids, 5, REGIONS.values(), (2, 1, 3))
    assert left.dtype == ids.dtype and left[6, 6, 6] == 1 and not left[15].any()
    assert (left[2, 2, 2:4] == 2).all() and left[11, 2, 2] == 2
    assert np.array_equal(left[:14] > 0, ids[:14] > 0) and np.isin(left, REGIONS["TC"]).sum() == 125
    assert np.array_equal(drop_small_components(ids, 2, REGIONS.values(), (2, 1, 3)) == 0, ids == 0)
    odd = np.where(ids == 3, 9, ids)  # what no region holds stays as it is
    assert (drop_small_components(odd, 5, [(1, 2)], [2])[6, 6, 6]) == 9


def test_regions_are_filtered_in_the_file(tmp_path, echo, capsys) -> None:
    truth = np.zeros((12, 11, 9), np.uint8)
    truth[1:11, 1:10, 1:8], truth[5, 5, 5] = 2, 4
    save(tmp_path / "images" / "case.nii.gz", truth, np.diag([2, 2, 2, 1]))
    recipe = replace(RECIPE, schemes=("none",), values=(0, 1, 2, 4))
    run = make_run(tmp_path / "run", recipe, regions=REGIONS, regions_class_order=[2, 1, 3])
    assert act(tmp_path, run, "--min-component", "9") == 0
    assert np.array_equal(voxels(tmp_path / "out" / "case.nii.gz"), np.where(truth == 4, 2, truth))
    assert "windows, --min-component leaves nothing of TC, ET, " in capsys.readouterr().out


def test_the_smallest_component_acts_in_the_file(tmp_path, echo, capsys) -> None:
    truth = np.zeros((12, 11, 9), np.uint8)
    truth[2:5, 2:5, 2:5], truth[8, 8, 7] = 1, 1
    save(tmp_path / "images" / "case.nii.gz", truth, np.diag([2, 2, 2, 1]))
    run = make_run(tmp_path / "run", replace(RECIPE, schemes=("none",)))
    for size, left in (("8", 28), ("9", 27), ("2voxels", 27)):
        assert act(tmp_path, run, "--min-component", size) == 0
        assert int(voxels(tmp_path / "out" / "case.nii.gz").sum()) == left
        assert "leaves nothing" not in capsys.readouterr().out
    assert act(tmp_path, run, "--min-component", "999") == 0
    assert "--min-component leaves nothing of label 1, " in capsys.readouterr().out
    write_json(tmp_path / "steps.json", Learned(((1, 2),), {"all": 0.5}, {"all": 0.6}).content({"all": (1, 2)}))
    truth[8, 8, 5:8] = 2
    save(tmp_path / "images" / "case.nii.gz", truth)
    run = make_run(tmp_path / "three", replace(RECIPE, schemes=("none",), values=(0, 1, 2)))
    more = ["--min-component", "2voxels", "--postprocessing", str(tmp_path / "steps.json")]
    assert act(tmp_path, run, *more, out="cleaned") == 0
    assert set(np.unique(voxels(tmp_path / "cleaned" / "case.nii.gz"))) == {0, 1}
    assert "leaves nothing" not in capsys.readouterr().out, "the largest component alone was kept"


def test_postprocessing_may_name_the_labels_that_a_run_joined(tmp_path, echo) -> None:
    """Evaluate learns it on the truth's values, and the run writes only one of them."""
    truth = np.zeros((12, 11, 9), np.uint8)
    truth[2:5, 2:5, 2:5], truth[8, 8, 7] = 1, 1
    save(tmp_path / "images" / "case.nii.gz", truth)
    steps = Learned(((1, 3),), {"tumour": 0.5}, {"tumour": 0.6})
    write_json(tmp_path / "steps.json", steps.content({"tumour": (1, 3)}))
    more = ["--postprocessing", str(tmp_path / "steps.json")]
    run = make_run(tmp_path / "run", replace(RECIPE, schemes=("none",), joined=((3, 1),)))
    assert act(tmp_path, run, *more) == 0
    assert int(voxels(tmp_path / "out" / "case.nii.gz").sum()) == 27
    with pytest.raises(ValueError, match="is for label 3, which .* does not write"):
        act(tmp_path, make_run(tmp_path / "other", replace(RECIPE, schemes=("none",))), *more)

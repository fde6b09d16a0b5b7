"""The pages of each task, by its name."""

import argparse
from collections.abc import Callable

from seqpar.report.record import RunRecord
from seqpar.report.run_page import FinishedPage
from seqpar.report.several_runs import Compare
from seqpar.tasks.classify.page import class_page, compare_classifiers
from seqpar.tasks.pretrain.page import pretraining_page
from seqpar.tasks.segment.page import compare_segmentations, segment_page

PAGES: dict[str, Callable[[argparse.Namespace, RunRecord], FinishedPage]] = {
    "segment": segment_page,
    "classify": class_page,
    "pretrain": pretraining_page,
}
COMPARERS: dict[str, Compare] = {
    "segment": compare_segmentations,
    "classify": compare_classifiers,
    "pretrain": compare_segmentations,  # without scores of cases, which the page says
}

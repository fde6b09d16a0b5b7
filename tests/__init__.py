"""The tests. ``make test`` gives their workers huge pages, from which they fork sooner; what tests start has none."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.pop("GLIBC_TUNABLES", None)

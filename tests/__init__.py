"""The tests; ``make test`` gives their workers huge pages, which acts from a process's start on and is not for what they start."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.pop("GLIBC_TUNABLES", None)

"""Programs end with the exit code of their act and all that they printed, also without the end of Python's own."""

import subprocess
import sys

import pytest

from tests.support.pages import ROOT


@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_program_that_used_a_gpu_ends_without_pythons_end_and_loses_nothing(on_gpu: bool) -> None:
    """What was registered for the end is done, what was printed is written, and the code is the act's."""
    code = f"""
import atexit, sys, types
from seqpar.cluster import exit_codes
class Late:  # runs only if Python takes its modules apart
    def __del__(self):
        sys.stderr.write("python ended"); sys.stderr.flush()
sys.modules["torch"] = types.SimpleNamespace(cuda=types.SimpleNamespace(is_initialized=lambda: {on_gpu}))
exit_codes.late = Late()
atexit.register(print, "registered")
print("printed", end=" ")
exit_codes.leave(3)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (3, "printed registered\n"), done.stderr
    assert ("python ended" in done.stderr) != on_gpu

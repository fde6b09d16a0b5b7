"""How programs end: with their exit code and all that they printed, and in one line if another rank is gone."""

import subprocess
import sys

import pytest

from seqpar.cluster import exit_codes
from tests.support.pages import ROOT


@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_program_that_used_a_gpu_leaves_the_interpreter_whole_and_loses_nothing(on_gpu: bool) -> None:
    """Threads end, exit handlers run, what was printed is written, and the code is the program's."""
    code = f"""
import atexit, sys, threading, time, types
from seqpar.cluster import exit_codes
class Late:  # runs only if Python takes its modules apart
    def __del__(self):
        sys.stderr.write("python ended"); sys.stderr.flush()
sys.modules["torch"] = types.SimpleNamespace(cuda=types.SimpleNamespace(is_initialized=lambda: {on_gpu}))
exit_codes.late = Late()
atexit.register(print, "registered")
print("printed", end=" ")
threading.Thread(target=lambda: (time.sleep(0.2), print("threaded", end=" "))).start()
exit_codes.leave(3)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (3, "printed threaded registered\n"), done.stderr
    assert ("python ended" in done.stderr) != on_gpu


@pytest.mark.parametrize("world", ["1", "2"])
def test_a_rank_that_lost_another_one_says_so_in_one_line(
    world: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A single process has no peers: the same words come from a mistake, whose traceback is needed."""
    for name, value in {"RANK": "0", "WORLD_SIZE": world, "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": "29500"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)

    def act(arguments: object) -> int:
        raise RuntimeError("Connection closed by peer: rank 1\nrank 0 was in plan of the seq group")

    if world == "1":
        with pytest.raises(RuntimeError, match="Connection closed"):
            exit_codes.run(act, [])
        return
    assert exit_codes.run(act, []) == 1
    assert capsys.readouterr().err == "error: rank 0 lost contact with its peers: Connection closed by peer: rank 1\n"

"""A headless Chromium, driven over a pipe by the DevTools protocol: no port, no package."""

import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from typing import Any

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --window-size=1200,1000 --remote-debugging-pipe"
)
PATIENCE = 120.0  # seconds, for machines with much else to do


def find() -> str | None:
    """Returns the program's path, None where it is not installed."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def lacking() -> str:
    """Returns why no browser can run here; empty where one can."""
    return "" if find() else "Chromium is not installed (Debian: chromium)"


class Chromium:
    """One browser with one page; ``complaints`` are exceptions, console errors and refused or failed loads."""

    def __init__(self, program: str) -> None:
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        read_by_it, self.to_it = os.pipe()
        self.from_it, written_by_it = os.pipe()
        theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (read_by_it, written_by_it)]

        def connect() -> None:
            for end, number in zip(theirs, (3, 4)):
                os.dup2(end, number)

        self.process = subprocess.Popen(
            [program, *FLAGS.split(), f"--user-data-dir={self.folder.name}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=connect, pass_fds=(3, 4),
        )  # fmt: skip
        for end in (read_by_it, written_by_it, *theirs):
            os.close(end)
        self.buffer, self.number, self.session = b"", 0, ""
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = next(t for t in self.ask("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self.ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Returns the answer to a command; what happens meanwhile is noted."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.to_it, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + PATIENCE
        while True:
            answer = self._next(until)
            if answer.get("id") == self.number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
            self._note(answer)

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.from_it], [], [], max(0.0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            piece = os.read(self.from_it, 1 << 16)
            assert piece, "the browser has ended"
            self.buffer += piece
        text, _, self.buffer = self.buffer.partition(b"\0")
        return dict(json.loads(text))

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event["method"] == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.complaints.append(str(params["args"]))
        elif event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(params["entry"]["text"])
        elif event["method"] == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def value(self, script: str) -> Any:
        """Returns what an expression in the page gives."""
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, script: str) -> None:
        """Returns once an expression in the page is true."""
        until = time.monotonic() + PATIENCE
        while not self.value(script):
            assert time.monotonic() < until, f"never came true: {script}"
            time.sleep(0.05)

    def open(self, url: str) -> None:
        """Opens a page and waits for its viewer, where it has one."""
        self.ask("Page.navigate", url="about:blank")
        self.wait("location.href === 'about:blank'")
        self.ask("Page.navigate", url=url)
        self.wait("location.protocol !== 'about:' && document.readyState === 'complete'")
        self.wait("!document.getElementById('viewer') || viewer.getAttribute('aria-busy') === 'false'")

    def close(self) -> None:
        with contextlib.suppress(AssertionError, OSError):
            self.ask("Browser.close")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.process.kill()
        self.process.wait()
        os.close(self.to_it)
        os.close(self.from_it)
        self.folder.cleanup()


if __name__ == "__main__":
    print(lacking(), end="")

"""Progress over cases, on a terminal or in a log."""

import time

from seqpar.display import Display, bar, clock
from seqpar.quantity import quantity


class ProgressBar:
    """Prints to stderr how many cases are done: a bar on a terminal, else a line after every tenth and every minute.

    activity: what is done to the cases, such as "preparing".
    """

    def __init__(self, activity: str) -> None:
        self.activity, self.start, self.tenth = activity, time.monotonic(), -1
        self._display = Display("stderr")

    def __call__(self, done: float, total: int) -> None:
        """Shows that ``done`` of ``total`` cases are done; a fraction is of cases that are being worked on."""
        if total == 0:
            return
        spent, is_over = time.monotonic() - self.start, done >= total
        fields = [f"{self.activity} {quantity(total, 'case')} {bar(done / total)} {done / total:.0%}"]
        if not is_over:
            fields.append(f"{clock(spent / done * (total - done))} left" if done else "? left")
        fields.append(f"{clock(spent)} so far" if not is_over else f"in {spent:.0f} s")
        tenth = int(done * 10 / total)
        if is_over and self.tenth == 10:
            return
        self._display.show(fields, milestone=is_over or (tenth != self.tenth and not self._display.on_terminal))
        self.tenth = tenth
        if is_over:
            self._display.close()

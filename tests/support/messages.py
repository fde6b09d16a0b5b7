"""Errors as somebody reads them who typed flags."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from seqpar.text import in_flags


@contextmanager
def refused_with(pattern: str) -> Iterator[None]:
    """Expects a ValueError whose text, as a command prints it, matches ``pattern``."""
    with pytest.raises(ValueError) as caught:
        yield
    text = in_flags(str(caught.value))
    assert re.search(pattern, text), text

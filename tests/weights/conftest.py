"""Fixtures of the tests of weights."""

import os

import pytest


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    """No power is cut here, and disks of test machines are slow."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)

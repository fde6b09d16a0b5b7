"""The stored fingerprints, to which seqpar is compared in the other tests, are what the real nnU-Net says."""

import json

from tests.data.test_fingerprint import TOLD, refuse_differing
from tests.nnunet.there_and_back import acts


def test_stored_fingerprints_are_nnunets(tmp_path) -> None:
    acts(tmp_path / "root", ["fingerprints", tmp_path / "told.json"])
    refuse_differing(json.loads((tmp_path / "told.json").read_text()), TOLD)

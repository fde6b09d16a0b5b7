"""Reads, prepares and samples volumes: from a folder of NIfTI files to this rank's part of a tile."""

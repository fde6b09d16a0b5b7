"""The decoders that ``--decoder`` names."""

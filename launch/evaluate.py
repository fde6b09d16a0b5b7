"""Compares predicted label maps, or classes, with the true ones: ``python launch/evaluate.py TRUTH PREDICTION``."""

from seqpar.cli.evaluate import main

if __name__ == "__main__":
    main()

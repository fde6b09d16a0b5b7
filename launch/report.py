"""Writes one HTML page about a run, to open and to send, or about several: ``python launch/report.py RUN …``."""

from seqpar.cli.report import main

if __name__ == "__main__":
    main()

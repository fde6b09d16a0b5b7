"""Checks the ranks and nodes of a job before it starts: ``srun -n 8 python launch/doctor.py --seqpar 4``."""

from seqpar.cli.doctor import main

if __name__ == "__main__":
    main()

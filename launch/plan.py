"""Plans a run before it is queued: ``python launch/plan.py --tile 128 --patch 4 --preset paper``."""

from seqpar.cli.plan import main

if __name__ == "__main__":
    main()

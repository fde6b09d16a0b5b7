"""The rest is in pyproject.toml. A wheel also gets the job scripts, which a checkout has in launch/slurm."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithJobScripts(build_py):
    """Copies the job scripts into the package, except for an editable install, which finds them in the checkout."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            shutil.copytree("launch/slurm", Path(self.build_lib, "seqpar/cluster/slurm"), dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithJobScripts})

"""Python runs this at its start: as soon as torch is imported, CPU kernels take the place of CUDA's.

Not earlier, so that programs still can set what torch reads when it is imported.
"""

import importlib
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Finds torch as usual, and installs the kernels when it has been imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)  # programs look for torch before they import it
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_install(module: ModuleType) -> None:
            sys.meta_path.remove(self)
            execute(module)
            importlib.import_module("pretended_kernels").install()
            importlib.import_module("pretended_nccl").install()
            importlib.import_module("pretended_graphs").install()
            if os.environ.get("PRETENDED_SANITIZER") == "1":
                importlib.import_module("torch.cuda._sanitizer").enable_cuda_sanitizer()

        spec.loader.exec_module = execute_and_install  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _AfterTorch())

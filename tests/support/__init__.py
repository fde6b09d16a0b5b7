"""What tests share. Threads are capped before torch is imported: children forked after a threaded autograd hang."""

import os

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[name] = "1"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

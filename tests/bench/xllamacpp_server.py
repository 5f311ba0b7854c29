"""llama.cpp's own server, as its prebuilt Python wheel brings it: xllamacpp_server.py MODEL SESSIONS CONTEXT THREADS.

Run by .venv-bench's interpreter; knows nothing of kvalet. Prints "listening on URL" and serves until it is killed.
"""

from __future__ import annotations

import sys
import threading

import xllamacpp  # type: ignore[import-not-found]


def main(model: str, sessions: int, context: int, threads: int) -> None:
    """``context``: tokens per session. The prompt cache is on, as it is by default."""
    parameters = xllamacpp.CommonParams()
    parameters.model.path = model
    parameters.n_parallel = sessions
    parameters.n_ctx = sessions * context
    parameters.cpuparams.n_threads = threads
    parameters.cpuparams_batch.n_threads = threads
    parameters.n_gpu_layers = 0
    parameters.verbosity = 0
    server = xllamacpp.Server(parameters)
    print(f"xllamacpp {xllamacpp.__version__}: listening on {server.listening_address}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))

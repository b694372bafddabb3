import gc

import decant.bench.benchmark
import decant.command.app
import decant.command.up.command
import decant.decode_worker.main
import decant.prefill_worker.main
import decant.router.main  # noqa: F401

gc.freeze()  # collections of a fork leave out what all of them share

"""What the processes of a deployment import, for the one that they are forked from."""

import gc

import decode_worker.main
import engine.model
import engine.warm_start
import prefill_worker.main
import router.main

MODULES = (decode_worker.main, engine.model, engine.warm_start, prefill_worker.main, router.main)

gc.freeze()  # what is shared by all stays out of the collections of each

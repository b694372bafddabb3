"""What the processes of a deployment import, for the one that they are forked from."""

import gc

import decant.decode_worker.main
import decant.engine.model.calibration
import decant.engine.model.model
import decant.prefill_worker.main
import decant.router.main  # noqa: F401

gc.freeze()  # what is shared by all stays out of the collections of each

"""Imported by the process that a deployment's processes are forked from."""

import gc

import decant.engine.model.calibration
import decant.engine.model.model  # noqa: F401
import tests.e2e.loaded_without_torch  # noqa: F401

gc.freeze()

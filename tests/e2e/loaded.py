"""Imports of the process from which a deployment's processes are forked."""

import gc

import decant.engine.model.calibration
import decant.engine.model.model  # noqa: F401
import tests.e2e.loaded_without_torch  # noqa: F401

gc.freeze()

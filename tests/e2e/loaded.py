"""Imports of the process from which a deployment's processes are forked."""

import gc

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import decant.engine.model.calibration
import decant.engine.model.model  # noqa: F401
import tests.e2e.loaded_without_torch  # noqa: F401
from decant import models

# transformers imports an architecture and builds its table of checkpoint formats at the first load.
config = AutoConfig.from_pretrained(models.path())
with torch.device("meta"):
    AutoModelForCausalLM.from_config(config)
get_checkpoint_conversion_mapping(config.model_type)

gc.freeze()

"""Settings that must stand before torch is imported: tests share the machine's cores with each other's processes."""

from __future__ import annotations

import os

import hypothesis

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "0")  # a spinning barrier waits for a thread that is not running
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

hypothesis.settings.register_profile("decant", deadline=None)  # a busy machine is not a failure
hypothesis.settings.load_profile("decant")

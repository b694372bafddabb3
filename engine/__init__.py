"""Inference engine: requests go in by ``loop.EngineLoop``, tokens come out as ``output.StepOutput`` per step.

``engine.Engine`` owns sequences and blocks and drives a ``plan.Device``: ``loading.load`` makes one that runs a model,
``fake.FakeDevice`` one of plain bytes. The modules of this folder import no network, and no torch except in
``loading`` and ``backends`` (choice of a backend). ``model`` runs transformers models, ``cpu`` and ``cuda`` have the
kernels and backends for those devices, ``checkpoint`` reads model folders.
"""

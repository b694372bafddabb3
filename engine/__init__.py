"""Inference engine: requests go in by ``loop.EngineLoop``, tokens come out as ``output.StepOutput`` per step.

``engine.Engine`` owns sequences and blocks. The modules of this folder import no torch, clock or network; they drive
a ``plan.Device``: ``model.model.load`` makes a real one, ``fake.FakeDevice`` one of plain bytes. ``model`` runs
transformers models, ``cpu`` has the kernels and the backend for CPUs, ``checkpoint`` reads model folders.
"""

"""Inference engine: requests enter by ``loop.EngineLoop``; each step's tokens leave as ``output.StepOutput``.

``engine.Engine`` owns sequences and blocks and drives a ``plan.Device``, made by ``loading.load``. These modules import
no network, and no torch but for ``loading`` and ``backends``. ``model`` runs transformers models, ``cpu`` and ``cuda``
have their backends and kernels, ``checkpoint`` reads model folders; ``fake.FakeDevice`` computes plain bytes.
"""

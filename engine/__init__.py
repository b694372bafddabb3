"""Inference engine: requests enter through ``loop.EngineLoop``; each step yields an ``output.StepOutput``.

The modules of this folder import no torch; they drive a ``plan.Device`` (``model.model.load``, ``fake.FakeDevice``).
"""

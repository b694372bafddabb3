"""Runs transformers models: ``model.load`` takes a checkpoint and returns a ``ModelDevice`` for the engine.

``runner`` turns a ``StepPlan`` into a ``StepResult``; ``kv_store`` owns the bytes of the blocks; ``backend`` owns all
that depends on the kind of device. ``probe`` refuses a model that would be computed wrong.
"""

"""Runs transformers models: ``model.make_device`` takes a model with its weights and returns a ``ModelDevice``.

``runner`` turns a ``StepPlan`` into a ``StepResult``; ``kv_store`` owns the bytes of the blocks; ``backend`` owns all
that depends on the kind of device. ``probe`` refuses a model that would be computed wrong.
"""

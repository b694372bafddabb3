"""A Hugging Face model as the device of an engine: load, probe, forward pass, sampling. Uses torch.

Entry: ``model.load``.
"""

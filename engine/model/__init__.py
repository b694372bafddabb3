"""Runs transformers models: ``model.load`` makes a ``ModelDevice``."""

"""The engine on one GPU beside limits measured in the same run: ``python -m bench.gpu``."""

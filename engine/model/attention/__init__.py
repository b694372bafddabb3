"""Attention of a model over paged KV blocks.

``interface`` takes transformers' calls, ``masks`` learns what each layer sees, ``paged`` computes attention in torch.
"""

"""Prompts that are computed for what they return themselves, scores and embeddings, and generate nothing.

Entry: ``runner.PromptRunner``. The prompts of one call enter; log-probabilities or embeddings leave. Nothing is
recorded and no worker keeps state for a call: a prompt whose worker fails is computed at another one.
"""

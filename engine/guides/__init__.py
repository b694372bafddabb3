"""Guided output: what a request's output must match, and the tokens that it allows next.

``Guide`` is what a client asks for. ``GrammarCompiler`` makes a ``Grammar`` of it, for the tokenizer of a model, and
``GuideMask`` follows one sequence. Everything that parses is the library ``llguidance``, imported on first use.
"""

"""Text to tokens and tokens to text: chat templates, tokenizing, detokenizing, stop strings.

No gRPC. One ``ServedModel`` per model that the router serves.
"""

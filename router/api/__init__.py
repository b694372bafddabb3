"""gRPC requests in, messages out: authentication, validation, limits, responses. Decides nothing about workers.

Entry: ``service.InferenceService``.
"""

"""The service ``vllm.grpc.engine.VllmEngine``, for gateways that speak to vLLM's engines.

It maps each message to ``decant.v1`` and back; requests, tenants, quotas, deadlines and failover are those of `api`.
"""

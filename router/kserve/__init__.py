"""KServe's open inference protocol with Triton's streams, for clients of Triton's vLLM backend.

Entry: ``service.KServeService``. Tensors enter and leave; each request is one of ``decant.v1``.
"""

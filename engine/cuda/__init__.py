"""The engine on CUDA: Triton kernels and the backend that uses them. ``backend.CudaBackend`` is the only entry.

Modules named ``*_kernels`` import triton; they are imported only by a backend that uses them.
"""

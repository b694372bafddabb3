"""Triton kernels and the CUDA backend; ``backend.make_cuda_backend`` is the only entry.

Modules named ``*_kernels`` import triton; only a backend that uses them imports them.
"""

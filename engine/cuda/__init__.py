"""Triton kernels and the CUDA backend, whose only entry is ``backend.make_cuda_backend``.

Modules named ``*_kernels`` import triton; only a backend that uses them imports them.
"""

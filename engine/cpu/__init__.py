"""Everything specific to CPUs: packed weights, fused operations, attention, and their C++ kernels."""

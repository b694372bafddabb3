"""C++ kernels for x86-64: one build for AVX2, one for AVX-512 with BF16, VBMI and VBMI2. ``loader`` imports the one
that this CPU runs. README.md lists the files and their history.
"""

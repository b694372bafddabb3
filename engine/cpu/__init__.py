"""Everything specific to CPUs. Entry: ``backend.make_cpu_backend``, which returns a ``Backend``.

A loaded model goes in. ``optimize`` packs its weights and fuses its operations in place; the backend makes KV store,
attention and sampler that compute its steps, with the C++ kernels of ``kernels`` if they were built.
"""

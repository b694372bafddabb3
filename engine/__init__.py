"""One inference engine for both kinds of worker: paged, continuously batched, the same bits in any batch.

The pure half (``sequence``, ``blocks``, ``scheduler``, ``policy``, ``plan``, ``engine``) knows no torch, no
clock and no I/O; the device half (``kv_store``, ``model``, ``attention``, ``sampler``, ``runner``) turns a
``StepPlan`` into a ``StepResult``. ``fake`` is a device half made of plain bytes.
"""

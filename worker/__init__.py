"""A worker of either role: the engine on its thread, and the services Prefill, Decode, KvSource and Audit."""

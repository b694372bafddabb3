"""A worker of either role: the engine on its thread, and the services Prefill, Decode, KvSource and Admin.

Entry: ``main.Worker``, which makes an ``engine_host.EngineHost`` of what `startup` loads. The host owns the engine's
loop, the sender and the receiver; `prefill` and `decode` own the runs on it and subscribe to its events; `report` reads
them.
"""

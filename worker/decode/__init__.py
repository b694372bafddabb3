"""The Decode service: sessions with routers, and the runs that are decoded here.

Entry: ``service.DecodeService``. Commands of a router enter by its session, and frames and reports of its runs leave by
it. ``run_table.RunTable`` keeps the runs; until its end a coroutine, ``execution.RunExecutor.execute``, owns each.
"""

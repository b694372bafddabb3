"""The Prefill service: computes prompts, issues tickets, returns first tokens.

Entry: ``service.PrefillService``. A prompt enters with a call; ticket, first token and end leave as its events. A
coroutine, ``execution.PrefillExecutor.execute``, owns the run; the lease of its ticket owns the KV cache.
"""

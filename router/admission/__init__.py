"""Whether a request may start: the forecast of its end, and quotas.

Entry: ``AdmissionControl``, asked before a request is validated, and ``quota.QuotaLeases`` when it starts. Requests
enter; QueueFull or QuotaExceeded leaves. QuotaLeases owns this router's leases in Redis.
"""

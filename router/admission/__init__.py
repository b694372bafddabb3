"""Whether a request may start: predicted waits and quotas. The bounded queue is the runtime's `Admission`.

Entry: ``overload.check_wait`` before a request is validated, ``quota.QuotaLeases`` when it starts. Requests enter;
QueueFull or QuotaExceeded leaves. QuotaLeases owns this router's leases in Redis.
"""

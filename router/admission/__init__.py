"""Whether and when a request may start: the bounded queue, quotas, predicted waits."""

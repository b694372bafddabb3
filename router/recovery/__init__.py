"""What outlives a router: its registration, and takeover of a lost router's requests.

Entry: ``registration.RouterRegistrar`` and ``takeover.OrphanRecovery``, each a task of the process. Changes of the
directory enter; requests without a live owner leave, to ``RequestRegistry.take_over``, which owns them from then on.
"""

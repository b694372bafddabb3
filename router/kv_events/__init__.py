"""Events of the deployment's prefix caches, for gateways that choose among several deployments.

    prompts, answers --> KnownBlocks: tokens by hash --+
                                                       +--> EventFeed of a tenant's model --> Subscription, one a call
    heartbeats --------> hashes that workers report ---+

A block is published while its tokens are known here, a worker has it, and the block before it is published. Entry:
``publisher.KvEventPublisher``; it does nothing without a limit of its memory. Everything runs on the event loop.
"""

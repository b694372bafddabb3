"""Measures a running deployment as its clients see it.

    workload ──> requests: prompts and forced lengths ┐
    arrivals ──> when each is sent                     ├──> load ──> records ──> statistics ──> report
                                                       │              one per request
    sweep: several runs at growing rates ──────────────┘

Everything runs in one process on one event loop, through `decant.client`.
"""

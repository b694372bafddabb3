"""Sizes a deployment before it exists: arithmetic from a model, a device, a workload and objectives to workers.

    Model, Device ──> Room: tokens and sequences that fit      (memory)
                  ──> Speed: seconds of a prefill and a step    (roofline, or a measured profile)
    Workload, Slo ──> Plan: workers of each role, latency, goodput, bytes/s between the pools   (sizing)

    Plan, Workload    ──> Simulation ──> Outcome                 (the router's placement code, in simulated time)

No torch and no network. Only ``calibrate`` loads a model, to measure this machine; only the simulation needs the
packages of a router.
"""

"""Sizes a deployment by arithmetic.

Model, Device ──> Room: tokens and sequences that fit      (memory)
              ──> Speed: seconds of a prefill and a step    (roofline, or a measured profile)
Workload, Slo ──> Plan: workers, latency, goodput, bytes/s between pools   (sizing)
Plan          ──> Simulation ──> Outcome

Needs no torch: only ``calibrate`` loads a model, only the simulation loads packages of a router.
"""

"""Sizes a deployment before it exists: from a model, a device, a workload and objectives to workers of each role.

Memory gives the tokens that fit; a roofline or a measured profile gives the seconds of a step; `simulation` runs a plan
with the router's placement. No torch and no network, except that ``calibrate`` loads a model and a hub name may
download its config.json.
"""

"""`decant top`: both pools, rates and latency of the last minute, and the requests in flight.

command: pages (admin ports) --> samples (differences) --> figures --> screen, or JSON
"""

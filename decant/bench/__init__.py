"""Measures a running deployment as its clients see it, in one process on one event loop, through `decant.client`.

`traffic` makes the requests and sends them, each leaves a `Record`, and `reports` sums the records up and shows them.
`benchmark` runs this once, or at growing rates.
"""

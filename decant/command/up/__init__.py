"""`decant up`: a deployment on this machine.

`command` runs `checks` first, `plan` makes the settings of each process, `supervisor` starts, restarts and ends them.
"""

"""What a long prompt does to answers that are running: a split deployment beside mixed ones on the same cores.

configurations ──> a deployment each ──> trials ──> figures ──> verdict, reports

trial    running answers   | | | | | | |    |      |    | | | |
         the long prompt           ^sent ............^first ^second token
                            before |     during            |
"""

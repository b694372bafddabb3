"""`python -m decant.command`, where the console script is not on PATH."""

from decant.command import main

main()

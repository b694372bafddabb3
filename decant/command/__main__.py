"""`python -m decant.command`, if the console script is not on PATH."""

from decant.command import main

main()

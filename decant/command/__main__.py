from decant.command import main

main()

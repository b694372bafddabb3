"""`decant bench` and its subcommands."""

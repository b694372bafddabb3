"""The `decant` command. Importing this package is quick: what a command needs is imported when it runs."""

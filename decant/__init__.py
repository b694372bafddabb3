"""What users import and type: the client, and the `decant` command."""

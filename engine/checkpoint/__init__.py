"""Model folders and hub repositories: their files, their dtype, and whether they can be served."""

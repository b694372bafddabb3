"""One folder per package of the project, and `build` for what the build itself promises."""

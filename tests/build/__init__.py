"""Tests of the build: stubs in every install, minimum versions."""

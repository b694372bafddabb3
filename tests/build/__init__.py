"""What the build promises: stubs in every install, floors that hold."""

"""A part of the open inference protocol of KServe and Triton, with the stubs that the build generates."""

"""`decant bench calibrate`: costs of a deployment's workers as its clients see them, for `decant plan --calibrate`."""

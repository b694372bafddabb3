"""Measures a running deployment through `decant.client`, on one event loop."""

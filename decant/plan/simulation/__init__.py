"""A plan in simulated time, with the routers' own placement code."""

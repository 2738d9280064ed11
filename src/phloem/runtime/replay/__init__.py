"""Real traces through the real tree, with any policy at any capacity."""

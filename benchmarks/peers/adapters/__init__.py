"""One module for each library that takes part."""

"""phloem behind real models and servers: what a program imports from here, by module."""

"""What `make gpu-check` runs on a machine with an NVIDIA GPU."""

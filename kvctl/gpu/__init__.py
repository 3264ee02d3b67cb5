"""Cards: the NVML adapter in its own thread, and a simulated card behind the same interface."""

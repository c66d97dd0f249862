"""From a folder of safetensors to weights on the device, fused and repacked for the backend."""

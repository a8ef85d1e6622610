"""Headers of frames, by sender and receiver. Tensors follow as raw bytes, in the order of `tensors`."""

"""What travels in a frame's header, by who says it to whom. Tensors follow as raw bytes, in the order of `tensors`."""

"""Encoded images as samples: decoded by Pillow when a batch asks for them, transformed, with a class each."""

"""A fleet of machines: they join, stay, are probed and called to work."""

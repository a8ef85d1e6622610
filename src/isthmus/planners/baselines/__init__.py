"""Published planners as printed: one file, or one package, per idea."""

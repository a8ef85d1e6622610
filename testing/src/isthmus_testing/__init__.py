"""Code that proves Isthmus and is no part of it: an emulated accelerator, an emulated wide-area network, and parties in
one process. Tests and benchmarks import it. The package `isthmus` does so for `device = "checked"` of a job alone."""

"""A page that shows runs in a browser, while they work and afterwards: read from run folders alone.

`run_folder` reads; `run_view`, `timeline` and `rounds` make documents of what was read, and know no browser; `server`
answers HTTP; `page` is what a browser gets. Nothing here imports torch.
"""

"""A page that shows runs in a browser, while they work and afterwards: read from run folders alone.

`run_folder` reads, `spans`, `run_view`, `rounds` and `fleet_view` turn what was read into documents for the page, and
know no browser; `server` answers HTTP; `page` is what a browser gets. Nothing here imports torch.
"""

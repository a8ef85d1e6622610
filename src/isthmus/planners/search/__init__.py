"""Our search for a plan: replicas, devices, orders, cuts, shares, recomputation, data holders, money."""

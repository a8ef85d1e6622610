"""Secure aggregation: secrets in shares, masks that cancel in the sum, a site's secrets, and their recovery."""

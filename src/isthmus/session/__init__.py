"""A session: members join, are lost and are called, and a program decides what they do."""

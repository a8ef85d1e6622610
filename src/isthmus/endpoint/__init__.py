"""OpenAI's HTTP requests, answered by the model of a run.

documents.py is what requests and answers say, server.py answers and ends texts at stop strings.
"""

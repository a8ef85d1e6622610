"""OpenAI's HTTP requests, answered by the model of a run.

documents.py is what requests and answers say, text_stream.py ends texts at stop strings, server.py answers.
"""

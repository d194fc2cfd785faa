"""The server: OpenAI's API over HTTP, on an AsyncEngine.

protocol.py reads requests, answers.py writes responses, app.py has the routes, metrics.py what Prometheus
asks for, page/ the pages that show the engine at work.
"""

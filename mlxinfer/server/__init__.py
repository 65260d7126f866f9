"""The HTTP server: OpenAI- and Anthropic-style APIs over the engine. Knows no models, no mlx.

The path of one request:

    protocol.py    bytes to ASGI (uvicorn's, with a limit on slow headers)
    guard.py       request id, access log, Host, Origin, key, sizes; every error becomes a body here
    endpoint.py    reads and decodes the body, runs the handler, sends its reply, cancels on hang-up
    <api>.py       one file an API: its ENDPOINTS, request and response types, handlers
    generation.py  answers of one call, from the engine's thread to the event loop
    served.py      one running model; models.py: the registry of them

A new API is a file with a tuple ENDPOINTS, named in `apis.py`.
"""

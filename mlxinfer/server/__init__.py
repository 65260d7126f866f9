"""The HTTP server: OpenAI- and Anthropic-style APIs over the engine. Knows no models, no mlx.

What imports what, from the bottom up (a test keeps it so):

    errors keys settings background
    http/        bytes to ASGI, the guard, bodies, replies, event streams, how errors look
    registry/    models by name: loaded when asked for, within a memory budget, unloaded
    watch/       request_metrics, vitals, readiness, the log
    fields/      what the fields of requests mean
    calls/       one request while it is answered: endpoint, call, generation, admission
    openai/ anthropic/ ops/    the paths; none of them knows another
    apis app running           the list of the paths, the ASGI app, sockets and signals

The path of one request:

    http/protocol.py     bytes to ASGI (uvicorn's, with a limit on slow headers)
    http/guard.py        request id, access log, Host, Origin, key, sizes; errors become bodies here
    calls/endpoint.py    reads and decodes the body, runs the handler, sends its reply, cancels on
                         hang-up
    openai/chat.py …     handlers, between the types of requests and answers
    calls/generation.py  answers of one call, from the engine's thread to the event loop
    registry/served.py   one running model

A new path is a file with a tuple ENDPOINTS, named in `apis.py`.
"""

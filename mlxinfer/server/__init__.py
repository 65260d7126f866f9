"""The HTTP server: OpenAI- and Anthropic-style APIs over the engine. Imports no models and no mlx.

What imports what, from the bottom up (a test keeps it so):

    errors keys settings background
    http/        bytes to ASGI, the guard, bodies, replies, event streams, error styles
    registry/    models by name: loaded on request, within a memory budget, unloaded
    watch/       request metrics, readiness, the log
    fields/      the meaning of request fields that several APIs share
    calls/       one request while it is answered: endpoint, call, generation, admission
    openai/ anthropic/ ops/    the paths; none of them imports another
    app running                the list of all paths, the ASGI app, sockets and signals

The path of one request:

    http/protocol.py     bytes to ASGI (uvicorn's, with limits on slow headers and tiny chunks)
    http/guard.py        request id, access log, Host, Origin, key, sizes; errors become replies
    calls/endpoint.py    reads and decodes the body, runs the handler, sends its reply, cancels on
                         disconnect
    openai/chat.py …     handlers, from the types of requests to those of answers
    calls/generation.py  answers of one call, from the engine's thread to the event loop
    registry/served.py   one running model

A new path is a file with a tuple ENDPOINTS, named in `app.py`.
"""

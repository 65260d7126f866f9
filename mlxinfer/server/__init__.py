"""The HTTP server: OpenAI's, Anthropic's and Ollama's APIs over sessions. Imports no mlx.

The path of one request:

    protocol.py          bytes to ASGI (uvicorn's, with limits on slow headers and tiny chunks)
    guard.py             request id, access log, Host, Origin, key, sizes; errors become replies
    app.py http.py       the table of routes: path, handler and the access that it needs
    call.py              reads the body, runs the handler, sends its reply, cancels on disconnect
    apis/chat.py …       body -> ChatInput, steps -> frames, results -> body
    ../session/          the conversation behind every API
    models.py served.py  models by name: loaded on request, within a memory budget, unloaded

A new API is one file in apis/ and its lines in the table of app.py.
"""

"""The HTTP server: OpenAI's, Anthropic's and Ollama's APIs over sessions. Imports no mlx.

The path of one request:

    protocol.py          bytes to ASGI (uvicorn's, with limits on slow headers and tiny chunks)
    app.py               the table of routes: path, handler and the access that it needs
    guard.py             checks before a body is read: Host, Origin, sizes, media type; keys.py: key
    call.py              reads the body, runs the handler, sends its reply, cancels on disconnect;
                         errors become replies, and each request a line of the log
    apis/chat.py …       body -> ChatInput, steps -> frames, results -> body
    ../session/          the conversation behind every API
    models.py slots.py   models by name: loaded on request, within a memory budget, unloaded

A new API is one file in apis/ and its lines in the table of app.py.
"""

"""The HTTP server: uvicorn and starlette, with limits on what a connection may cost, keys, and checks of who asks."""

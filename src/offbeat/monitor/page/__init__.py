"""The page that shows finished and running runs in a browser. Needs the extra `watch` (starlette, uvicorn)."""

"""The page: runs, past ones and those under way, in a browser. Needs the extra `watch` (starlette, uvicorn)."""

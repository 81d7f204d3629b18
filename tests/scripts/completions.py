"""Stands in for vllm: /health answers after two seconds, and a completion is the prompt, reversed.
With BROKEN it ends before, and with SILENT it never answers."""

import http.server
import json
import os
import sys
import time

if "BROKEN" in os.environ:
    sys.exit(3)
time.sleep(600 if "SILENT" in os.environ else 2)


class Server(http.server.BaseHTTPRequestHandler):
    def answer(self, content: dict):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer({})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer({"choices": [{"text": asked["prompt"][::-1]}]})


# As uvicorn's. With the default of 5 it resets connections.
http.server.ThreadingHTTPServer.request_queue_size = 2048
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("", port), Server).serve_forever()

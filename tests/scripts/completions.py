"""Stands in for vllm: /health answers after two seconds, and a completion is the prompt, reversed.
With BROKEN it ends before, and with SILENT it never answers. On several nodes, by vLLM's options
for them, the first waits for the others, which answer no requests."""

import http.server
import json
import os
import socket
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


def option(name: str, default: str = "") -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


nodes, rank = int(option("--nnodes", "1")), int(option("--node-rank", "0"))
assert ("--headless" in sys.argv) == (rank > 0)
place = (option("--master-addr"), int(option("--master-port", "0")))
if rank > 0:
    while True:
        try:
            first = socket.create_connection(place)
            break
        except OSError:
            time.sleep(0.1)
    print(f"Node {rank} on {os.environ['SLURMD_NODENAME']} has joined", flush=True)
    sys.exit(first.recv(1) or 0)  # when the first node's ends
if nodes > 1:
    meeting = socket.create_server(place)
    others = [meeting.accept() for _ in range(nodes - 1)]

# As uvicorn's. With the default of 5 it resets connections.
http.server.ThreadingHTTPServer.request_queue_size = 2048
http.server.ThreadingHTTPServer(("", int(option("--port"))), Server).serve_forever()

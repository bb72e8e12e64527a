"""Serving with a package: one process compiles and writes a file, another loads it, without a compiler, and answers over HTTP.

    python examples/serve.py pack model.fsp
    python examples/serve.py serve model.fsp --port 8000
    curl -d '[[0.1, 0.2, 0.3, 0.4]]' localhost:8000
"""
from __future__ import annotations

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

import firesteel as fs

FEATURES, CLASSES = 4, 3


def pack(path: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 32), torch.nn.GELU(), torch.nn.Linear(32, CLASSES), torch.nn.Softmax(-1)).eval()
    with torch.no_grad():
        fs.package(model, (torch.randn(2, FEATURES),), path, dynamic={0: {0: (1, 256)}})       # batches of 1 to 256
    print(f"wrote {path}")


def server(path: str, port: int) -> ThreadingHTTPServer:
    program = fs.load(path)

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                rows = torch.tensor(json.loads(self.rfile.read(int(self.headers["Content-Length"]))), dtype=torch.float32)
                with torch.no_grad():
                    status, answer = 200, json.dumps(program(rows).tolist())
            except (ValueError, TypeError, fs.errors.PackageError) as error:       # another size or type than was packed
                status, answer = 400, str(error)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer.encode())

        def log_message(self, *args: object) -> None:
            pass
    return ThreadingHTTPServer(("127.0.0.1", port), Answers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("pack", "serve"))
    parser.add_argument("path")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    if options.what == "pack":
        pack(options.path)
    else:
        running = server(options.path, options.port)
        print(f"http://127.0.0.1:{running.server_port}", flush=True)
        running.serve_forever()


if __name__ == "__main__":
    main()

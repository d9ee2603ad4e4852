"""Measure the latency of a served model and check its answers: `python -m benchmarks.serving RUN`.

The server runs in a separate process and the clients in threads of this one, over the loopback
device. Every answer is compared with the local prediction. One body in ten is not a picture.
"""

from __future__ import annotations

import argparse
import io
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import requests
from PIL import Image

import equilibria as eq
from equilibria.data import load_digits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="run of a classifier of the digits")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--requests", type=int, default=640, help="requests per number of clients")
    options = parser.parse_args()
    digits = (load_digits().test.images[:200] * 255).round() / 255
    labels = [prediction.label for prediction in eq.predict(options.run, digits)]
    bodies = [as_png(digit) for digit in digits]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "equilibria", "serve", str(options.run), "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(address)
        print(
            "| clients | answers per second | median | 95 % | 99 % | mean batch | wrong or lost |"
        )
        print("|---:|---:|---:|---:|---:|---:|---:|")
        for clients in options.clients:
            print(measured(address, bodies, labels, clients, options.requests), flush=True)
    finally:
        server.terminate()
        server.wait(30)


def measured(
    address: str, bodies: list[bytes], labels: list[str | None], clients: int, count: int
) -> str:
    def client(number: int) -> list[tuple[float, bool]]:
        answers = []
        with requests.Session() as session:
            for turn in range(count // clients):
                place = (number * 31 + turn * 17) % len(bodies)
                broken = (number + turn) % 10 == 0
                body = bodies[place][:40] if broken else bodies[place]
                started = time.perf_counter()
                answer = session.post(f"{address}/predict", data=body, timeout=60)
                seconds = time.perf_counter() - started
                right = (
                    answer.status_code == 400
                    if broken
                    else answer.status_code == 200 and answer.json()["label"] == labels[place]
                )
                answers.append((seconds, right))
        return answers

    started = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answers = [a for group in pool.map(client, range(clients)) for a in group]
    elapsed = time.perf_counter() - started
    seconds = sorted(s for s, _ in answers)
    wrong = sum(not right for _, right in answers) + (count // clients) * clients - len(answers)
    text = requests.get(f"{address}/metrics", timeout=60).text
    (batch,) = (line.split()[1] for line in text.splitlines() if line.startswith(MEAN_BATCH))
    shares = " | ".join(
        f"{1e3 * seconds[int(q * (len(seconds) - 1))]:.0f} ms" for q in (0.5, 0.95, 0.99)
    )
    total = len(answers)
    return f"| {clients} | {total / elapsed:.0f} | {shares} | {batch} | {wrong} of {total} |"


MEAN_BATCH = "equilibria_mean_batch_size "


def as_png(digit: object) -> bytes:
    content = io.BytesIO()
    Image.fromarray((digit[0] * 255).round().byte().numpy()).save(content, "PNG")  # type: ignore[index]
    return content.getvalue()


def wait_for(address: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            requests.get(f"{address}/health", timeout=5)
            return
        except requests.ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


if __name__ == "__main__":
    main()
